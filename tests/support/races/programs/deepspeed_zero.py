"""DeepSpeed's ZeRO. The argument is the stage, 1 to 3; "offload" keeps optimizer states on the
host."""

import sys
from typing import Any

import deepspeed
import torch
from torch import nn

deepspeed.init_distributed("nccl")
stage = next(int(each) for each in sys.argv[1:] if each.isdigit())
zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
zero |= {"stage3_param_persistence_threshold": 0}
if "offload" in sys.argv:
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": zero,
    "zero_force_ds_cpu_optimizer": False,
}
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for _ in range(4):
    x = torch.randn(4, 64, device=engine.device, dtype=torch.bfloat16)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
print(f"loss {loss.item():.3f}")
