"""Copies the next batch to the GPU on a side stream while it trains on this one. With "wrong", the
allocator is not told that the training uses the batch."""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Prefetcher:
    def __init__(self, loader: DataLoader) -> None:
        self.batches = iter(loader)
        self.stream = torch.cuda.Stream()
        self.load()

    def load(self) -> None:
        self.batch = next(self.batches, None)
        if self.batch is not None:
            with torch.cuda.stream(self.stream):
                self.batch = [each.cuda(non_blocking=True) for each in self.batch]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self.batch is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.batch
            if "wrong" not in sys.argv:
                for each in batch:
                    each.record_stream(torch.cuda.current_stream())
            self.load()
            yield batch


data = TensorDataset(torch.randn(128, 32), torch.randint(4, (128,)))
loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
model = nn.Linear(32, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for x, y in Prefetcher(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"loss {loss.item():.3f}")
