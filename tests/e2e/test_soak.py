"""A run through random faults ends as if there had been none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_runs import ROOT
from tools.soaking.faults import KINDS

NUM_FAULTS = 10
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_ten_faults_cost_no_step_and_change_no_loss(tmp_path: Path):
    result = tmp_path / "soak.json"
    command = [sys.executable, "tools/soak.py", "--faults", str(NUM_FAULTS), "--seed", "7", "--json", str(result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    found = json.loads(result.read_text())
    assert found["faults"] == NUM_FAULTS
    assert found["by_kind"] == dict.fromkeys(KINDS, NUM_FAULTS // len(KINDS))
    assert found["losses_equal"]
    assert found["complete_steps_lost"] == 0
    assert found["left_over"] == []
    # Each of the four kinds that stop a run had it started again.
    assert found["starts"] > 4 * NUM_FAULTS // len(KINDS)
    assert 0 < found["recovery_s"]["median"] <= found["recovery_s"]["max"]
    assert found["recovery_s"]["by_kind"]["failed save"]["max"] is None
