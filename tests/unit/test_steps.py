"""Steps and actions: what is planned is what is done, and nothing of somebody else's is replaced."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.journal import Journal
from stratum.receipt import Condition, Receipt
from stratum.steps import (
    Action,
    Call,
    Command,
    MakeDirectory,
    PlaceLink,
    RemoveDirectory,
    RemoveFile,
    RemoveTree,
    Step,
    Work,
    WriteFile,
    plan_directory,
    plan_file,
    plan_link,
    remove_tree,
    run_steps,
)
from stratum.system import Host, HostPath
from tests.bundles import snapshot
from tests.fakes import FaultHost

FILE, LINK = HostPath("/etc/x/file"), HostPath("/etc/x/link")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/var/lib/stratum").mkdir(parents=True)
    (tmp_path / "root/etc").mkdir()
    return tmp_path / "root"


@pytest.fixture
def work(root: Path) -> Work:
    host = FaultHost(str(root), {})
    return Work(host, Receipt.load(host), Journal(host))


def perform(work: Work, actions: list[Action]) -> None:
    for action in actions:
        action.perform(work)


PLANS: dict[str, Callable[[Work], list[Action]]] = {
    "file": lambda work: plan_file(work, FILE, b"content", 0o640),
    "link": lambda work: plan_link(work, LINK, "/target"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_plan_changes_nothing_is_done_and_is_then_empty(
    work: Work, root: Path, plan: Callable[[Work], list[Action]]
) -> None:
    before = snapshot(root)
    actions = plan(work)
    assert snapshot(root) == before
    assert [type(action) for action in actions][:-1] == [MakeDirectory]
    perform(work, actions)
    assert plan(work) == []
    perform(work, actions)  # an action may be repeated
    assert plan(work) == []


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_each_path_is_in_the_receipt_on_the_disk_before_it_is_made(
    work: Work, root: Path, plan: Callable[[Work], list[Action]]
) -> None:
    host = work.host
    assert isinstance(host, FaultHost)
    for action in plan(work):
        start = len(host.mutations)
        action.perform(work)
        lines = host.mutations[start:]
        recorded = next(i for i, line in enumerate(lines) if line.startswith("rename") and "receipt.json" in line)
        made = next(i for i, line in enumerate(lines) if "/etc/x" in line)
        assert recorded < made


@pytest.mark.parametrize("there", ["file", "directory", "dangling", "link to a file", "fifo"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_an_entry_that_we_did_not_make_is_refused(
    work: Work, root: Path, plan: Callable[[Work], list[Action]], there: str
) -> None:
    (root / "etc/x").mkdir()
    (root / "etc/theirs").write_text("theirs")
    for name in ("file", "link"):
        path = root / "etc/x" / name
        if there == "file":
            path.write_text("theirs")
        elif there == "directory":
            path.mkdir()
        elif there == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("nowhere" if there == "dangling" else "../theirs")
    before = snapshot(root)
    with pytest.raises(StratumError) as caught:
        plan(work)
    assert caught.value.reference == "foreign-file"
    assert caught.value.hint
    assert snapshot(root) == before


def test_a_foreign_file_that_says_the_same_is_taken_as_ours_only_when_it_is_written(work: Work, root: Path) -> None:
    (root / "etc/x").mkdir()
    (root / "etc/x/file").write_bytes(b"content")
    assert plan_file(work, FILE, b"content") == [WriteFile(FILE, b"content")]
    assert work.receipt.get(FILE) is None


def test_a_file_of_ours_that_differs_is_written_again(work: Work, root: Path) -> None:
    perform(work, plan_file(work, FILE, b"content"))
    for change in (
        lambda: (root / "etc/x/file").write_bytes(b"edited"),
        lambda: (root / "etc/x/file").chmod(0o600),
        lambda: (root / "etc/x/file").unlink(),
    ):
        change()
        actions = plan_file(work, FILE, b"content")
        assert actions == [WriteFile(FILE, b"content")]
        perform(work, actions)
        assert plan_file(work, FILE, b"content") == []
    assert plan_file(work, FILE, b"newer") == [WriteFile(FILE, b"newer")]


def test_a_link_of_ours_is_turned_when_its_target_is_another(work: Work, root: Path) -> None:
    perform(work, plan_link(work, LINK, "/one"))
    assert plan_link(work, LINK, "/two") == [PlaceLink(LINK, "/two")]
    perform(work, plan_link(work, LINK, "/two"))
    assert os.readlink(root / "etc/x/link") == "/two"
    entry = work.receipt.get(LINK)
    assert entry and entry.contents == ("/one", "/two")


def test_only_missing_directories_are_planned_top_first(work: Work, root: Path) -> None:
    assert plan_directory(work.host, HostPath("/etc/a/b")) == [
        MakeDirectory(HostPath("/etc/a")),
        MakeDirectory(HostPath("/etc/a/b")),
    ]
    assert plan_directory(work.host, HostPath("/etc/a/b"), 0o700) == [
        MakeDirectory(HostPath("/etc/a")),
        MakeDirectory(HostPath("/etc/a/b"), 0o700),
    ]
    assert plan_directory(work.host, HostPath("/etc")) == []
    (root / "etc/linked").symlink_to("/var/lib")
    assert plan_directory(work.host, HostPath("/etc/linked")) == []
    assert plan_directory(work.host, HostPath("/etc/linked/new")) == [MakeDirectory(HostPath("/etc/linked/new"))]


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777], ids=oct)
def test_modes_do_not_depend_on_the_umask(work: Work, root: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        perform(work, plan_file(work, FILE, b"x", 0o640))
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "etc/x").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "etc/x/file").stat().st_mode) == 0o640


# -- removing -------------------------------------------------------------------------------------------


def test_removing_what_is_gone_is_done_already(work: Work) -> None:
    for action in (
        RemoveFile(HostPath("/etc/none")),
        RemoveDirectory(HostPath("/etc/none")),
        RemoveTree(HostPath("/etc/none")),
        RemoveTree(HostPath("/etc/none"), spare="x"),
    ):
        action.perform(work)


def test_a_directory_with_something_in_it_is_kept(work: Work, root: Path) -> None:
    (root / "etc/d").mkdir()
    (root / "etc/d/theirs").touch()
    RemoveDirectory(HostPath("/etc/d")).perform(work)
    assert (root / "etc/d/theirs").exists()


def test_a_failure_other_than_that_is_not_hidden(work: Work, root: Path) -> None:
    (root / "etc/f").touch()
    with pytest.raises(NotADirectoryError):
        RemoveDirectory(HostPath("/etc/f")).perform(work)
    (root / "etc/d").mkdir()
    with pytest.raises(OSError):
        RemoveFile(HostPath("/etc/d")).perform(work)


def test_a_tree_that_is_a_link_or_a_file_by_now_is_not_followed(work: Work, root: Path) -> None:
    (root / "srv").mkdir()
    (root / "srv/canary").touch()
    (root / "etc/tree").symlink_to("/srv")
    remove_tree(work.host, HostPath("/etc/tree"))
    assert (root / "srv/canary").exists()
    assert not (root / "etc/tree").is_symlink()


def test_a_spared_entry_stays_and_its_directory_with_it(work: Work, root: Path) -> None:
    (root / "run/x/deep").mkdir(parents=True)
    (root / "run/x/lock").touch()
    RemoveTree(HostPath("/run/x"), spare="lock").perform(work)
    assert os.listdir(root / "run/x") == ["lock"]


def test_a_tree_deeper_than_a_path_can_say_is_removed(tmp_path: Path) -> None:
    """A process in a container made it, by mkdir and cd; nothing else can name its bottom."""
    top = tmp_path / "deep"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("n" * 250, dir_fd=here)
        deeper = os.open("n" * 250, os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=deeper))
        os.close(here)
        here = deeper
    os.close(here)
    remove_tree(Host("/"), HostPath(str(top)))
    assert not top.exists()


def test_unwritable_directories_in_a_tree_of_ours_are_no_obstacle_to_root(work: Work, root: Path) -> None:
    (root / "etc/t/d").mkdir(parents=True)
    (root / "etc/t/d/f").touch()
    (root / "etc/t/d").chmod(0o500)
    try:
        remove_tree(work.host, HostPath("/etc/t"))
    except PermissionError:
        assert os.geteuid() != 0
        (root / "etc/t/d").chmod(0o700)
    else:
        assert not (root / "etc/t").exists()


# -- running steps --------------------------------------------------------------------------------------


class Log:
    """Steps that write down when they plan and act."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, name: str, *actions: str, fail: bool = False) -> Step:
        def act(action: str) -> None:
            self.lines.append(f"do {action}")
            if fail:
                raise StratumError("broken", action)

        def plan() -> list[Action]:
            self.lines.append(f"plan {name}")
            return [Call("do", action, lambda action=action: act(action)) for action in actions]  # type: ignore[misc]

        return Step(name, name, plan)


def test_a_step_is_planned_when_its_turn_comes_and_in_the_journal_before_it_acts(work: Work) -> None:
    log = Log()
    seen: list[str | None] = []

    def begin() -> None:
        log.lines.append("begin")
        work.journal.begin("test")

    steps = [log.step("one"), log.step("two", "a", "b"), log.step("three", "c")]
    outcome = run_steps(work, steps, before_first_change=begin, on_step=lambda step, _: seen.append(step.name))
    assert log.lines == ["plan one", "plan two", "begin", "do a", "do b", "plan three", "do c"]
    assert seen == ["two", "three"]
    assert [step.name for step, _ in outcome.performed] == ["two", "three"]
    operation = work.journal.read()
    assert operation and operation.step == "three"


def test_nothing_to_do_opens_no_journal(work: Work, root: Path) -> None:
    before = snapshot(root)
    outcome = run_steps(work, [Log().step("one")], before_first_change=lambda: pytest.fail("begun"))
    assert not outcome.changed
    assert snapshot(root) == before


def test_a_dry_run_plans_every_step_and_does_none(work: Work, root: Path) -> None:
    log = Log()
    before = snapshot(root)
    steps = [log.step("one", "a"), Step("dir", "d", lambda: plan_directory(work.host, HostPath("/etc/n/m")))]
    outcome = run_steps(work, steps, dry_run=True, before_first_change=lambda: pytest.fail("begun"))
    assert log.lines == ["plan one"]
    assert outcome.changed
    assert snapshot(root) == before


def test_a_dry_run_names_a_directory_once_that_two_steps_need(work: Work) -> None:
    steps = [
        Step("one", "", lambda: plan_file(work, FILE, b"x")),
        Step("two", "", lambda: plan_link(work, LINK, "x")),
    ]
    dry = run_steps(work, steps, dry_run=True).to_json()
    real = run_steps(work, steps).to_json()
    assert dry == real


def test_the_first_failure_ends_the_run(work: Work) -> None:
    log = Log()
    with pytest.raises(StratumError):
        run_steps(work, [log.step("one", "a", "b", fail=True), log.step("two", "c")])
    assert log.lines == ["plan one", "do a"]


def test_an_outcome_is_plain_json(work: Work) -> None:
    steps = [
        Step("all", "everything", lambda: [
            MakeDirectory(HostPath("/d")), WriteFile(HostPath("/f"), b"\xff"), PlaceLink(HostPath("/l"), "t"),
            RemoveFile(HostPath("/f")), RemoveDirectory(HostPath("/d")), RemoveTree(HostPath("/t")),
            Command(("systemctl", "daemon-reload"), 1.0), Call("import image", "x", lambda: None),
        ])
    ]  # fmt: skip
    (step,) = json.loads(json.dumps(run_steps(work, steps, dry_run=True).to_json()))
    assert [f"{action['verb']} {action['subject']}" for action in step["actions"]] == [
        "make directory /d",
        "write /f",
        "link /l -> t",
        "remove /f",
        "remove directory /d",
        "remove tree /t",
        "run systemctl daemon-reload",
        "import image x",
    ]


def test_a_secret_that_is_written_shows_in_no_description() -> None:
    assert "secret" not in repr(WriteFile(HostPath("/key"), b"secret", 0o600))


def test_a_directory_that_appears_between_plan_and_action_is_no_error(work: Work, root: Path) -> None:
    actions = plan_file(work, FILE, b"x")
    (root / "etc/x").mkdir(mode=0o700)
    perform(work, actions)
    assert stat.S_IMODE((root / "etc/x").stat().st_mode) == 0o700
    entry = work.receipt.get(FILE)
    assert entry and work.receipt.condition(entry) == Condition.OURS
