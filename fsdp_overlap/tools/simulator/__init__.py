"""Predict training steps at any scale, by running the real schedule on emulated time."""

from fsdp_overlap.tools.simulator.clock import Clock
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.fsdp2 import Fsdp2Training
from fsdp_overlap.tools.simulator.hardware import Device, Fabric, Host
from fsdp_overlap.tools.simulator.models import known_models
from fsdp_overlap.tools.simulator.offload import OffloadPrediction, predict_offload
from fsdp_overlap.tools.simulator.on_cpu import CpuPrediction, simulate_on_cpu
from fsdp_overlap.tools.simulator.profile import Profile
from fsdp_overlap.tools.simulator.search import SearchResult, TrainingPlan, search
from fsdp_overlap.tools.simulator.simulate import Prediction, Step, simulate
from fsdp_overlap.tools.simulator.training import Training

__all__ = [
    "Clock",
    "Costs",
    "CpuPrediction",
    "Device",
    "Fabric",
    "Fsdp2Training",
    "Host",
    "OffloadPrediction",
    "Prediction",
    "Profile",
    "SearchResult",
    "Step",
    "Training",
    "TrainingPlan",
    "known_models",
    "predict_offload",
    "search",
    "simulate",
    "simulate_on_cpu",
]
