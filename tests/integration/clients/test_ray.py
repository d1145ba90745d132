"""Ray Train's workers train on our units as on FSDP2's, and go on after a failure.

Ray has an environment of its own, which ``scripts/clients/run.sh ray`` makes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from support.examples import EXAMPLES

ROOT = EXAMPLES.parents[1]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
RUN = ROOT / "tests" / "support" / "ray_run.py"

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs scripts/clients/run.sh ray"),
    pytest.mark.slow,
    pytest.mark.timeout(450),
]


def test_workers_train_as_on_fsdp2_and_go_on_from_the_checkpoint_reported(tmp_path: Path) -> None:
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLES))),
        "HOME": str(tmp_path),  # Ray writes a secret there, by which its processes know each other
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    started = subprocess.Popen(
        [str(PYTHON), str(RUN), str(tmp_path / "run")],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=400)
    finally:
        # Ray's own processes end with the one that has started them.
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, output[-6000:]
    assert "trained alike" in output
