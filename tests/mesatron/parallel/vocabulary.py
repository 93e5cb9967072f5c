"""The output layer's loss in a tensor group: `python vocabulary.py CONFIG FOLDER`, run by every process.

Saves to FOLDER/N.pt, by form and kind of number: losses, the gradients of hidden states and of the rows held, and the
losses where one target is no word.
"""

import sys
from pathlib import Path

import torch

from mesatron.config import load_config
from mesatron.parallel import distributed
from mesatron.parallel.layout import lay_out
from mesatron.parallel.shares import Share, share_of
from mesatron.parallel.tensor import TensorParallel

config, folder = load_config(Path(sys.argv[1])), Path(sys.argv[2])
layout = lay_out(config, distributed.start())
tensor = TensorParallel(config, layout.tensor)
whole = torch.load(folder / "whole.pt", map_location=layout.world.device)
found = {}
for form, dtype in (("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)):
    model = config.model.model_copy(update={"implementation": form})
    embedding = tensor.embedding(share_of(model, layout.tensor.size), model.vocabulary_size)
    embedding = embedding.to(layout.world.device, dtype)
    assert embedding.implementation == form
    share = Share(whole["weight"].shape, embedding.weight.info, embedding.weight.shape, layout.tensor, 0)
    with torch.no_grad():
        embedding.weight.copy_(share.cut(whole["weight"]))
    hidden = whole["hidden"].to(dtype, copy=True).requires_grad_()
    losses = embedding(tensor.enter(hidden), whole["targets"], chunk_tokens=9)
    losses.backward(whole["cotangent"].to(dtype))
    targets = whole["targets"].clone()
    targets[:, 2] = model.vocabulary_size
    results = [losses, hidden.grad, embedding.weight.grad, embedding(hidden, targets)]
    found[form, dtype] = [x.detach().cpu() for x in results]
torch.save(found, folder / f"{layout.tensor.rank}.pt")
distributed.stop()
