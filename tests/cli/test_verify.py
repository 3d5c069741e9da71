from __future__ import annotations

from pathlib import Path

import kvformat
from kvformat.cli.progress import Bar, Lines, meter
from tests.cli.datasets import flip, interrupted


def shard_of(dataset: Path, number: int) -> Path:
    return dataset / kvformat.open(dataset).index.shard(number).path


def test_a_sound_dataset(run, published: Path) -> None:
    result = run("verify", published)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("ok: no faults at level 4\n")
    assert f"id {kvformat.open(published).id}" in result.stdout
    found = run("verify", published, "--json").json
    assert (found["ok"], found["level"], found["records"], found["findings"], found["warnings"]) == (
        True,
        4,
        4,
        [],
        [],
    )
    assert found["id"] == kvformat.open(published).id


def test_all_faults_with_their_codes(run, dataset: Path) -> None:
    flip(shard_of(dataset, 0), -4097)
    flip(shard_of(dataset, 1), 12)
    covered = next((dataset / "files").iterdir())
    flip(covered, 5)
    (dataset / "[red]README").write_text("x", encoding="ascii")
    report = kvformat.verify(dataset)
    result = run("verify", dataset, "--json")
    found = result.json
    assert (result.code, found["ok"], result.stderr) == (1, False, "")
    assert [f["code"] for f in found["findings"]] == [f.code for f in report.findings]
    assert {"E006", "E063", "E077"} <= {f["code"] for f in found["findings"]}
    assert set(found["findings"][0]) == {"code", "name", "message", "path", "record", "layer"}
    assert found["findings"][0]["path"] == str(covered)
    assert [w["code"] for w in found["warnings"]] == ["W001"]
    shown = run("verify", dataset)
    assert shown.code == 1
    for finding in found["findings"]:
        assert f"fault [{finding['code']}] {finding['name']}: {finding['message']}\n" in shown.stdout
    assert f"path {dataset}/[red]README\n" in shown.stdout
    assert f"FAULTY: {len(report.findings)} faults, 1 warning at level 4\n" in shown.stdout


def test_levels(run, dataset: Path) -> None:
    flip(shard_of(dataset, 0), 4096 * 2 + 100)  # a value
    assert [run("verify", dataset, "--level", level).code for level in (1, 2, 3, 4)] == [0, 0, 1, 1]


def test_the_expected_id(run, published: Path) -> None:
    identity = kvformat.open(published).id
    assert run("verify", published, "--level", 1, "--expected-id", identity).code == 0
    result = run("verify", published, "--level", 1, "--expected-id", "0" * 64, "--json")
    assert (result.code, [f["code"] for f in result.json["findings"]]) == (1, ["E007"])


def test_an_unreadable_dataset_is_a_finding(run, dataset: Path) -> None:
    (dataset / "kvformat.json").write_bytes(b"{}")
    result = run("verify", dataset)
    assert (result.code, result.stderr) == (1, "")
    assert result.stdout.startswith("fault [E01")
    assert "FAULTY: 1 fault at level 4\n" in result.stdout


def test_staged_work_is_a_warning(run, dataset: Path) -> None:
    unfinished = interrupted(dataset.parent / "unfinished")
    (unfinished / ".staging").rename(dataset / ".staging")
    result = run("verify", dataset)
    assert result.code == 0
    assert result.stdout.startswith("warning [W002] staging-left: ")
    assert "ok: no faults, 1 warning at level 4\n" in result.stdout


# --------------------------------------------------------------------------------------------------------- progress


def test_progress_lines_come_now_and_then(capsys) -> None:
    now = [0.0]
    with Lines(clock=lambda: now[0]) as lines:
        lines.begin("working", total=2_000_000)
        for second in range(1, 25):
            now[0] = float(second)
            lines.update(second * 10_000, note="fast")
        lines.begin("sealing")
    assert capsys.readouterr() == (
        "",
        "working: 2 MB\nworking: 100 kB of 2 MB, 5 %, fast\nworking: 200 kB of 2 MB, 10 %, fast\nsealing\n",
    )


def test_progress_without_a_total_or_announcements(capsys) -> None:
    now = [0.0]
    with Lines(clock=lambda: now[0], phases=False) as lines:
        lines.begin("working")
        now[0] = 11.0
        lines.update(5)
        lines.update(6)
    assert capsys.readouterr().err == "working: 5 bytes\n"


def test_a_bar_only_on_a_terminal(monkeypatch) -> None:
    assert isinstance(meter(), Lines)
    monkeypatch.setattr("kvformat.cli.output.is_terminal", lambda _stream: True)
    assert isinstance(meter(), Bar)


def test_verify_tells_how_far_it_is(run, monkeypatch, published: Path) -> None:
    told: list[tuple[int, int | None]] = []

    class Listening(Lines):
        def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
            told.append((done, total))

    monkeypatch.setattr("kvformat.cli.verify.meter", lambda *, phases: Listening(phases=phases))
    assert run("verify", published).code == 0
    assert told[-1] == (told[-1][1], told[-1][1])
    assert [done for done, _ in told] == sorted(done for done, _ in told)
