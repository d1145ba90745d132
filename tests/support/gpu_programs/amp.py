"""Mixed precision with a gradient scaler, compiled."""

import torch
from torch import nn
from torch.amp import GradScaler

assert torch.cuda.is_bf16_supported()
torch.backends.cuda.matmul.allow_tf32 = True
model = torch.compile(
    nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = GradScaler("cuda", init_scale=1024.0)
for _ in range(3):
    x, y = torch.randn(4, 3, 8, 8).cuda(), torch.randint(10, (4,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
    assert output.dtype is torch.float16
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}, {torch.cuda.max_memory_allocated()} bytes")
