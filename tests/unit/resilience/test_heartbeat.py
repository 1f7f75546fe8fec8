import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from moe_framework.errors import ConfigError, DependencyError
from moe_framework.resilience import heartbeat as module
from moe_framework.resilience.heartbeat import ANSWER_TIMEOUT_S, BackgroundClient, Heartbeat, open_heartbeat

PACKAGE = "nvidia_resiliency_ext.fault_tolerance"


class FakeClient:
    """Stands for NVRx's RankMonitorClient, and records what is asked of it."""

    def __init__(self, *, failing: str = ""):
        self.calls: list[str] = []
        self._failing = failing
        self.rank_monitor_socket = SimpleNamespace(settimeout=lambda seconds: self._call(f"settimeout {seconds}"))

    def init_workload_monitoring(self) -> None:
        self._call("init")

    def send_heartbeat(self) -> None:
        self._call("send")

    def shutdown_workload_monitoring(self) -> None:
        self._call("shutdown")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._failing:
            raise ConnectionResetError(f"{name} failed")


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the module, which needs no handler for that."""
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    return said


def use(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType(PACKAGE)
    package.RankMonitorClient = lambda: client  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, PACKAGE, package)


def beats_at(client: FakeClient, *times: float) -> list[float]:
    """The times of those calls of `beat` that have sent a message."""
    clock = Clock()
    heartbeat = Heartbeat(client, clock=clock)
    sent = []
    for clock.now in times:
        before = len(client.calls)
        heartbeat.beat()
        sent += [clock.now] if len(client.calls) > before else []
    return sent


def test_at_most_one_message_a_second_is_sent():
    assert beats_at(FakeClient(), 0.0, 0.1, 0.5, 1.0, 1.1, 1.2, 2.5, 3.4, 3.5) == [0.1, 1.1, 2.5, 3.5]


def test_the_first_call_sends_nothing_so_that_the_first_step_has_the_monitors_longer_timeout():
    assert beats_at(FakeClient(), 5.0) == []
    assert beats_at(FakeClient(), 5.0, 5.0) == [5.0]


@pytest.mark.parametrize(("mode", "under_launcher"), [("off", True), ("off", False), ("auto", False)])
def test_without_a_monitor_to_tell_nothing_is_imported(
    mode: str, under_launcher: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with open_heartbeat(mode, under_launcher=under_launcher) as heartbeat:
        heartbeat.beat()
        heartbeat.beat()


@pytest.mark.parametrize("mode", ["auto", "nvrx"])
def test_under_ft_launcher_the_monitor_is_told_and_at_last_left(mode: str, monkeypatch: pytest.MonkeyPatch):
    client = FakeClient()
    use(client, monkeypatch)
    with open_heartbeat(mode, under_launcher=True) as heartbeat:
        heartbeat.beat()
        heartbeat.beat()
    assert client.calls == ["init", f"settimeout {ANSWER_TIMEOUT_S}", "send", "shutdown"]


def test_after_the_end_nothing_is_sent(monkeypatch: pytest.MonkeyPatch):
    client = FakeClient()
    use(client, monkeypatch)
    with open_heartbeat("auto", under_launcher=True) as heartbeat:
        pass
    heartbeat.beat()
    heartbeat.beat()
    assert client.calls[-1] == "shutdown"


def test_nvrx_without_ft_launcher_is_refused():
    with pytest.raises(ConfigError, match=r"resilience\.heartbeat=nvrx: ft_launcher did not start.*heartbeat=auto"):
        open_heartbeat("nvrx", under_launcher=False)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(DependencyError, match=r"resilience\.heartbeat=auto needs nvidia_resiliency_ext.*resilience\]"):
        open_heartbeat("auto", under_launcher=True)


def test_a_monitor_that_fails_is_warned_of_once_and_ends_nothing(warnings: list[str]):
    client = FakeClient(failing="send")
    assert beats_at(client, 0.0, 1.0, 2.0, 3.0) == [1.0]
    assert client.calls == ["send", "shutdown"]
    assert warnings == [
        "no more heartbeats: this rank's monitor hangs, or has ended as it does at SIGUSR1 (send failed)"
    ]


def test_a_message_that_is_not_answered_holds_nobody_up_and_its_failure_is_raised_by_a_later_call():
    answered, client = threading.Event(), FakeClient(failing="send")
    client.send_heartbeat = lambda: (answered.wait(10), FakeClient.send_heartbeat(client))[1]
    background = BackgroundClient(client)
    background.send_heartbeat()
    background.send_heartbeat()
    assert client.calls == []
    answered.set()
    background._thread.join(5)
    with pytest.raises(ConnectionResetError, match="send failed"):
        background.send_heartbeat()
    background.shutdown_workload_monitoring()
    assert client.calls == ["send", "shutdown"]


def test_a_monitor_that_does_not_answer_at_the_start_is_warned_of(warnings: list[str], monkeypatch: pytest.MonkeyPatch):
    client = FakeClient(failing="init")
    use(client, monkeypatch)
    with open_heartbeat("auto", under_launcher=True) as heartbeat:
        heartbeat.beat()
        heartbeat.beat()
    assert client.calls == ["init"]
    assert warnings == ["no heartbeats: the launcher's monitor of this rank does not answer (init failed)"]


def test_a_monitor_that_is_gone_at_the_end_ends_nothing():
    heartbeat = Heartbeat(FakeClient(failing="shutdown"))
    heartbeat.close()
    heartbeat.close()
