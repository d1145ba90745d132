"""One thread computes in each process. The pool of ranks ends with the session; `gpu` tests run by
`-m gpu` or "gpu and ..." alone, and are skipped where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Tensors are small here: a thread more waits at the end of every operation, and takes the time of
# other workers and ranks. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# torch's flight recorder keeps the last 2000 collectives, so memory grows by some MiB until it has
# that many. Tests of memory are about other growth.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")  # which must come before what is imported from there

from support.ranks import close_pool, start_importing  # noqa: E402

pytest_plugins = ["support.short", "support.summary", "support.tries", "pytester"]

torch.set_num_threads(1)  # should torch have been imported before

# On a busy machine an example takes many times as long. That is no fault of what is tested.
settings.register_profile(
    "unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process has an emulated device or CUDA
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    if config.option.markexpr and not config.option.collectonly:
        start_importing()  # nearly all tests that are chosen by a mark need it


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs `-m gpu` and a CUDA device")


@pytest.fixture(autouse=True)
def _restore_matmul_precision() -> Iterator[None]:
    """Programs and libraries that tests run set it for the whole process."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def pytest_sessionfinish() -> None:
    close_pool()
