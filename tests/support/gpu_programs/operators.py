"""Modules and functions that make tensors by themselves, and what else torch has for GPUs."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

x = torch.randn(2, 5, 8, device="cuda", requires_grad=True)
attention = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True, add_bias_kv=True)
attention.cuda()(x, x, x)[0].sum().backward()
nn.LSTM(8, 8, batch_first=True).cuda()(x)[0].sum().backward()
nn.functional.one_hot(torch.arange(4, device="cuda")).float().sum().item()
logits = torch.randn(4, 3, device="cuda", requires_grad=True)
targets = torch.zeros(4, dtype=torch.long, device="cuda")
nn.functional.cross_entropy(logits, targets, label_smoothing=0.1).backward()
nn.functional.gumbel_softmax(logits)
torch.cdist(x[0], x[0]).sum().item()
torch.block_diag(x[0], x[1]).sum().item()
torch.linalg.svd(x[0])
torch.fft.rfft(x)
torch.func.vmap(lambda each: each * torch.ones(8, device="cuda"))(x)
torch.histc(targets, bins=3, min=0, max=3)


class Two(torch.autograd.Function):
    """Gets zeros that the engine makes for the output that is not used."""

    @staticmethod
    def forward(ctx, a):
        return a * 2, a * 3

    @staticmethod
    def backward(ctx, one, other):
        return one + other


Two.apply(x)[0].sum().backward()

stream = torch.Stream(device="cuda")
stream.wait_stream(torch.accelerator.current_stream())
with stream:
    y = x + 1
torch.accelerator.current_stream().wait_stream(stream)
y.sum().item()

begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) >= 0
assert torch.cuda.get_device_properties(0).name == torch.cuda.get_device_name()
assert torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1]
torch.cuda.nvtx.range_push("a step")
torch.cuda.nvtx.range_pop()
with torch.random.fork_rng(devices=[0]):
    torch.randn(2, device="cuda")

inputs = (torch.randn(4, 8, device="cuda", requires_grad=True),)
linear = torch.cuda.make_graphed_callables(nn.Linear(8, 8).cuda(), inputs)
linear(torch.randn(4, 8, device="cuda", requires_grad=True)).sum().backward()

query = torch.randn(1, 2, 16, 8, device="cuda")
mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cuda")
assert flex_attention(query, query, query, block_mask=mask).is_cuda
assert torch.tensor([1.0], device=0).is_cuda
activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
with torch.profiler.profile(activities=activities):
    x.sum().item()
