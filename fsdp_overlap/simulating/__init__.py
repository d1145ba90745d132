"""Predicts what training steps take at any scale, by running the real schedule on modelled time."""

from fsdp_overlap.simulating.clock import Clock
from fsdp_overlap.simulating.costs import Costs
from fsdp_overlap.simulating.fsdp2 import Fsdp2Training
from fsdp_overlap.simulating.hardware import Device, Fabric
from fsdp_overlap.simulating.models import known_models
from fsdp_overlap.simulating.on_cpu import CpuPrediction, simulate_on_cpu
from fsdp_overlap.simulating.profile import Profile
from fsdp_overlap.simulating.search import Found, Plan, search
from fsdp_overlap.simulating.simulate import Prediction, Step, simulate
from fsdp_overlap.simulating.training import Training

__all__ = [
    "Clock",
    "Costs",
    "CpuPrediction",
    "Device",
    "Fabric",
    "Found",
    "Fsdp2Training",
    "Plan",
    "Prediction",
    "Profile",
    "Step",
    "Training",
    "known_models",
    "search",
    "simulate",
    "simulate_on_cpu",
]
