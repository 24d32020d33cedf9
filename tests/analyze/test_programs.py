"""Whole runs: programs of many kinds are watched, studied and left as they are."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato.analyze import stand_in

from .support import (
    ROOT,
    SLEEPS,
    TOKEN,
    analyzed,
    command,
    environment,
    gone,
    program,
    study,
    with_token,
)

pytestmark = pytest.mark.limit(240)


def test_torchs_loader_is_studied_to_its_end(tmp_path: Path) -> None:
    done, found = study(tmp_path, SLEEPS + "main()\nprint('trained')")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "trained" and rest[0].startswith("Limit: ") and len(rest) <= 25
    assert found["schema"] == "1.0" and found["own"] == "torch"
    assert found["place"] == [str(tmp_path / "train.py"), 14, "main"]
    assert found["work"]["stages"][0]["label"] == "time.sleep()"
    assert {(r["loader"], r["workers"]) for r in found["rates"]} >= {("torch", 0), ("minato", 1)}
    assert (tmp_path / "report" / "index.html").exists()


def test_reads_that_wait_are_named_storage(tmp_path: Path) -> None:
    done, found = study(tmp_path, """
        import pathlib, time, torch
        from torch.utils.data import DataLoader, Dataset

        pathlib.Path("data").write_bytes(bytes(100))

        class Samples(Dataset):
            def __len__(self):
                return 64
            def load(self):
                time.sleep(0.02)
                with open("data", "rb") as file:
                    return file.read()
            def __getitem__(self, index):
                return len(self.load())

        loader = DataLoader(Samples(), 4, num_workers=2, persistent_workers=True)
        for _ in range(2):
            for batch in loader:
                pass
        """)  # fmt: skip
    assert found["limit"]["kind"] == "storage" and "load()" in found["limit"]["line"], done.stdout
    assert found["work"]["files"] == [str(tmp_path / "data")]


@pytest.mark.parametrize("package", ["torch.utils.data", "minato"])
def test_short_epochs_match_programs_own_rate(package: str, tmp_path: Path) -> None:
    """Stragglers, workers that stay, a validation after each epoch. minato's loader is studied as such."""
    done, found = study(tmp_path, f"""
        import time, torch
        from {package} import DataLoader

        class Samples(torch.utils.data.Dataset):
            def __init__(self, count):
                self.count = count
            def __len__(self):
                return self.count
            def __getitem__(self, index):
                time.sleep(0.15 if index % 16 == 3 else 0.005)
                return torch.tensor(index)

        train = DataLoader(Samples(160), 8, num_workers=2, persistent_workers=True, drop_last=True)
        checks = DataLoader(Samples(16), 8)
        spent = []
        for epoch in range(4):
            began = time.monotonic()
            for batch in train:
                time.sleep(0.007)
            spent.append(time.monotonic() - began)
            list(checks)
        print(160 * 3 / sum(spent[1:]), flush=True)
        """)  # fmt: skip
    measured = float(done.stdout.splitlines()[0])
    assert 0.75 < found["watched"]["delivered"] / measured < 1.25, done.stdout
    assert found["loader"]["samples"] == 160 and found["loader"]["length"] == 20
    assert found["watched"]["wait"] > 0.5
    if package == "minato":
        assert found["own"] == "minato" and found["loader"]["class"] == "minato.loader.DataLoader"
        assert {r["loader"] for r in found["rates"]} >= {"torch", "minato"}
    if found["helps"]:
        assert found["helps"][0]["gain"] == pytest.approx(
            found["helps"][0]["predicted"] / found["relative_to"]
        )


# ---- the program stays what it is ----------------------------------------------------------

SEEDED = """
import random, numpy, torch
from torch.utils.data import DataLoader, Dataset

class Lines(Dataset):
    def __init__(self):
        self.file = open("lines.txt", "rb")  # forks share its position
    def __len__(self):
        return 40
    def __getitem__(self, index):
        line = self.file.readline() or self.file.seek(0) or self.file.readline()
        return torch.tensor([float(line), random.random(), numpy.random.rand()]) + torch.rand(3)

torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
net = torch.nn.Linear(3, 1)
step = torch.optim.SGD(net.parameters(), 1e-5)
with open("losses.txt", "w") as out:
    for epoch in range(2):
        for batch in DataLoader(Lines(), 4, shuffle=True, num_workers={workers}):
            loss = net(batch.float()).square().mean()
            step.zero_grad(); loss.backward(); step.step()
            out.write(f"{{loss.item()!r}} {{random.random()!r}}\\n")
        torch.save([net.state_dict(), step.state_dict(), torch.get_rng_state()], f"{{epoch}}.pt")
raise SystemExit(7)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seeded_program_is_the_same_when_watched(workers: int, tmp_path: Path) -> None:
    files = []
    for watched in (False, True):
        folder = tmp_path / str(watched)
        folder.mkdir()
        (folder / "lines.txt").write_text("".join(f"{n}\n" for n in range(33)))
        file = program(folder, SEEDED.format(workers=workers))
        plain = [sys.executable, str(file)]
        whole = command("--budget", "3s", "--", *plain) if watched else plain
        done = subprocess.run(whole, cwd=folder, env=environment(), capture_output=True, text=True,
                              timeout=110)  # fmt: skip
        assert done.returncode == 7, done.stderr  # the program's own, watched or not
        files.append({
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.iterdir() if path.name != "report"
        })  # fmt: skip
    assert files[0] == files[1] and files[0].keys() == {
        "train.py", "lines.txt", "losses.txt", "0.pt", "1.pt",
    }  # fmt: skip


def test_a_sitecustomize_that_is_hidden_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine runs')\nMINE = True\n")
    text = "import sitecustomize, sys\nprint(sitecustomize.MINE, 'torch' in sys.modules)\n"
    file = program(tmp_path, text)
    done = analyzed(tmp_path, "--", sys.executable, file, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.splitlines() == ["mine runs", "True False"]
    assert done.returncode == 3


# ---- programs that cannot be watched -------------------------------------------------------


#: flags of Python, a program -> words of the cause
UNWATCHED: dict[str, tuple[list[str], str, list[str]]] = {
    **{flag: ([flag], "", [f"{flag} makes Python ignore PYTHONPATH", "import minato.analyze.watch"]) for flag in ("-I", "-E")},
    "no torch": ([], "print('no torch')", ["did not import torch"]),
    "no loader": ([], "import torch.utils.data\nraise SystemExit(5)", ["imported torch", "status 5"]),
    "no batch": (
        [], SLEEPS.replace("time.sleep(0.002)", "raise SystemExit(7)") + "main()",
        ["status 7", "the loader of Samples (", "num_workers=0) delivered no batch"]),
}  # fmt: skip


@pytest.mark.parametrize("what", UNWATCHED)
def test_program_that_cannot_be_watched_exits_three(what: str, tmp_path: Path) -> None:
    flags, text, words = UNWATCHED[what]
    done = analyzed(tmp_path, "--", sys.executable, *flags, program(tmp_path, text))
    assert done.returncode == 3 and [each for each in words if each not in done.stderr] == []
    assert ("status" in done.stderr) == ("SystemExit" in text)


def test_first_line_watches_where_path_is_ignored(tmp_path: Path) -> None:
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport minato.analyze.watch\n"
    file = program(tmp_path, first + SLEEPS + "main()")
    done = analyzed(tmp_path, "--anyway", "--budget", "3s", "--", sys.executable, "-I", file)
    assert done.returncode == 0 and done.stdout.startswith("Limit: "), done.stderr


def test_a_program_without_a_batch_is_reported(tmp_path: Path) -> None:
    text = "import sys, torch.utils.data\nsys.stdin.readline()\n"
    file = program(tmp_path, text)
    whole = command("--start-timeout", "0.5s", "--", sys.executable, file)
    with subprocess.Popen(whole, cwd=tmp_path, env=environment(), text=True, stdin=subprocess.PIPE,
                          stderr=subprocess.PIPE) as running:  # fmt: skip
        assert running.stderr is not None
        assert "no batch in 0 s" in running.stderr.readline()
        running.communicate("go on\n")
    assert running.returncode == 3


# ---- datasets that are not studied, or hardly ----------------------------------------------


def test_dataset_with_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    text = SLEEPS.replace("    def __len__", "    def __init__(self):\n        import socket\n"
                          "        self.server = socket.socket()\n    def __len__")  # fmt: skip
    done, found = study(tmp_path, text + "main()")
    assert done.returncode == 0 and found["work"] is None
    assert "dataset.server is a socket" in done.stdout and "factory" in done.stdout


@pytest.mark.parametrize("options", [(), ("--pause",)])
def test_a_dataset_with_a_manager_is_told_so(options: tuple[str, ...], tmp_path: Path) -> None:
    """The Manager's process has ended, or is paused: nothing is measured, and nothing of it advised."""
    text = SLEEPS.replace("    def __len__", "    def __init__(self):\n        self.seen = Manager().dict()\n    def __len__")
    text = text.replace("time.sleep(0.002)", "time.sleep(0.002); self.seen[index] = 1")
    text = "from multiprocessing import Manager\n" + text + f"main(epochs={80 if options else 3})"
    done, found = study(tmp_path, text, *options)
    assert done.returncode == 0, done.stderr
    assert found["limit"]["kind"] == "unknown"
    assert "dataset.seen is an object of a multiprocessing.Manager (DictProxy)" in done.stdout.splitlines()[0]
    assert not found["work"] and not found["rates"] and not found["helps"]
    assert "message to its process" in done.stdout and "factory" not in done.stdout and "--pause studies" not in done.stdout


def test_a_sample_that_hangs_is_named(tmp_path: Path) -> None:
    text = SLEEPS.replace("time.sleep(0.002)", "time.sleep(1000 if DONE and index == 5 else 0.002)")
    text = "import os\nDONE = False\n" + text + (
        "loader = DataLoader(Samples(), 4)\nfor batch in loader: DONE = DONE or False\n"
    )  # fmt: skip
    # the copy of the program is made at the first iteration: from then on it would hang there
    text = text.replace("DONE and", "os.getpid() != PID and") + ""
    done, found = study(tmp_path, "import os\nPID = os.getpid()\n" + text)
    assert done.returncode == 0
    assert "timing samples: not measured, ended because it took too long (at sample 5)" in done.stdout


def test_an_iterable_dataset_is_studied(tmp_path: Path) -> None:
    done, found = study(tmp_path, """
        import time, torch
        from torch.utils.data import DataLoader, IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                for number in range(60):
                    time.sleep(0.003)
                    yield torch.tensor(number)

        for batch in DataLoader(Stream(), 4, num_workers=1):
            pass
        """)  # fmt: skip
    assert done.returncode == 0 and len(found["work"]["costs"]) > 8, done.stdout + done.stderr
    assert found["rates"]


# ---- ends ----------------------------------------------------------------------------------

#: Its worker stays: one of torch's stays for ever if the program is killed while it starts.
ENDLESS = SLEEPS + """
loader = DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)
next(iter(loader))
print("begins", flush=True)
while True:
    for batch in loader:
        time.sleep(0.001)
"""


def begun(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A program that goes on for ever, and has begun."""
    env = environment()
    whole = command(*options, "--", sys.executable, program(folder, ENDLESS))
    running = subprocess.Popen(whole, cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert running.stdout is not None and running.stdout.readline() == "begins\n"
    return running, env[TOKEN]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    running, token = begun(tmp_path)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=100)
    assert running.returncode in (3, 130)
    assert gone(token) == []


def test_a_kill_while_paused_leaves_nothing(tmp_path: Path) -> None:
    running, token = begun(tmp_path, "--pause")

    def state_of(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            return ""

    def is_stopped() -> bool:
        return "T" in map(state_of, with_token(token))

    while not is_stopped():
        time.sleep(0.05)
    running.kill()
    running.communicate(timeout=100)
    assert gone(token) == []


def test_stop_ends_the_program_after_the_watch(tmp_path: Path) -> None:
    running, token = begun(tmp_path, "--stop", "--budget", "3s", "--anyway")
    out, errors = running.communicate(timeout=110)
    assert running.returncode == 0, errors
    assert "its handlers may write files" in errors and out.startswith("Limit: ")
    assert gone(token) == []


def test_pause_studies_before_the_program_ends(tmp_path: Path) -> None:
    """Its data are gone after that."""
    text = """
        import pathlib, tempfile, time
        from torch.utils.data import DataLoader, Dataset

        class Files(Dataset):
            def __init__(self, folder):
                self.folder = pathlib.Path(folder)
            def __len__(self):
                return 4
            def __getitem__(self, index):
                time.sleep(0.005)
                return len((self.folder / "data").read_bytes())

        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "data").write_bytes(b"123")
            end = time.monotonic() + 5
            while time.monotonic() < end:
                for batch in DataLoader(Files(folder), 2):
                    pass
        """
    done, found = study(tmp_path, text, "--pause")
    assert done.returncode == 0 and found["work"]["failures"] == 0, done.stdout + done.stderr
    done, found = study(tmp_path, text)
    assert "again with --pause" in done.stdout, done.stdout
    assert ", and none could be made; sample" in done.stdout and "no sample was timed" not in done.stdout


def test_a_program_too_short_for_a_pause_is_named(tmp_path: Path) -> None:
    done, _found = study(tmp_path, SLEEPS + "main(epochs=1)", "--pause")
    assert done.returncode == 0 and "ended before --pause could stop it" in done.stdout


# ---- launchers -----------------------------------------------------------------------------


def test_torchrun_studies_local_rank_zero(tmp_path: Path) -> None:
    file = program(tmp_path, SLEEPS + "main()")
    done = analyzed(tmp_path, "--anyway", "--budget", "3s", "--", sys.executable, "-m",
                    "torch.distributed.run", "--nproc-per-node", "2", file)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks share these cores; local rank 0 was studied" in done.stdout
    assert json.loads((tmp_path / "report" / "report.json").read_text())["work"]["costs"]


def test_a_shell_script_is_followed(tmp_path: Path) -> None:
    program(tmp_path, SLEEPS + "main()")
    done = analyzed(tmp_path, "--anyway", "--budget", "3s", "--", "bash", "-c",
                    f"cd {tmp_path}; {shlex.quote(sys.executable)} train.py; exit 4")  # fmt: skip
    assert done.returncode == 4 and "Limit: " in done.stdout


def test_lightnings_training_loader_is_chosen(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.importorskip("lightning", exc_type=ImportError)
    done, found = study(tmp_path, SLEEPS + """
import lightning, logging
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, _number):
        return self.net(batch.float()[:, None]).mean()
    def validation_step(self, batch, _number):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)
train, checks = DataLoader(Samples(), 4), DataLoader(list(range(8)), 4)
lightning.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False).fit(Model(), train, checks)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found["loader"]["dataset"] == "Samples"
    assert any("for other loaders" in note for note in found["notes"])


def test_factories_and_their_steps_are_run(tmp_path: Path) -> None:
    text = SLEEPS + """
def make():
    return Samples(), {"batch_size": 4}
def step(batch):
    time.sleep(0.004)
"""
    program(tmp_path, text)
    done = analyzed(tmp_path, "--anyway", "--budget", "3s", "train:make", "--step", "train:step")
    assert done.returncode == 0 and done.stdout.startswith("Limit: "), done.stderr
    found: Any = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["loader"]["dataset"] == "Samples" and found["watched"]["step"] > 0.004


def test_a_factory_that_fails_shows_its_error(tmp_path: Path) -> None:
    program(tmp_path, "def make():\n    len(3)\n")
    done = analyzed(tmp_path, "train:make")
    assert done.returncode == 3 and "TypeError: object of type 'int'" in done.stderr
    assert "train:make could not be studied" in done.stderr


def volumes(folder: Path) -> None:
    for n in range(20):
        np.save(folder / f"{n}.npy", np.zeros((8, 8, 8), np.float32))


def sounds(folder: Path) -> None:
    for n in range(20):
        sound(folder / f"{n}.WAV", 2, [0, 16384, -32768] * 1000)


def sound(path: Path, wide: int, values: list[int]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(wide)
        file.setframerate(16_000)
        signed = wide > 1
        file.writeframes(b"".join(value.to_bytes(wide, "little", signed=signed) for value in values))


@pytest.mark.parametrize("make, kind", [(volumes, "volume"), (sounds, "audio")])
def test_a_folder_of_files_is_studied(make: Any, kind: str, tmp_path: Path) -> None:
    make(tmp_path)
    out = str(tmp_path / "answer")
    done = analyzed(tmp_path, "--anyway", "--budget", "3s", "--step-ms", "1", "--out", out, tmp_path)
    assert done.returncode == 0 and f"20 {kind} files" in done.stderr, done.stderr
    found: Any = json.loads((tmp_path / "answer" / "report.json").read_text())
    assert found["loader"]["samples"] == 20 and found["work"]["files"]


@pytest.mark.parametrize("wide", [1, 2, 3, 4])
def test_sounds_of_all_widths_are_decoded(wide: int, tmp_path: Path) -> None:
    half, least = (192, 0) if wide == 1 else (1 << (8 * wide - 2), -(1 << (8 * wide - 1)))
    sound(tmp_path / "a.wav", wide, [half, least])
    assert stand_in.decode_audio(tmp_path / "a.wav")[:3].tolist() == [0.5, -1.0, 0.0]


def test_files_without_their_decoder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.flac").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match=r"\.flac files need .* pip install soundfile"):
        stand_in.folder_loader(str(tmp_path))


# ---- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    ([], "give a program"), (["--"], "no program after --"),
    (["--budget", "soon", "--", "true"], "not a duration"),
    (["--stop", "--pause", "--", "true"], "give one of them"),
    (["--step-ms", "3", "--", "true"], "a program has its own step"),
    (["x:y", "--step-ms", "-1"], "a step takes 0 ms or more"),
    (["nowhere"], "neither a folder nor MODULE:FACTORY; put -- before a command"),
    (["--budget", "9s", "python", "train.py", "-x"], "minato analyze [options] -- python train.py ARGS"),
    (["--cores", "100000", "--", "true"], "--cores 100000: there are"),
    (["--compare", "no.json", "no.json"], "not a report of minato analyze"),
])  # fmt: skip
def test_wrong_arguments_exit_two(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from minato.analyze import command as analyze

    monkeypatch.chdir(tmp_path)
    assert analyze.run(arguments) == 2
    assert words in capfd.readouterr().err


def test_a_program_that_cannot_start_exits_two(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "--", "./no-such-program")
    assert done.returncode == 2 and "cannot be started" in done.stderr


def test_a_folder_of_others_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("mine")
    done = analyzed(tmp_path, "--", "true")
    assert done.returncode == 2 and "holds other files" in done.stderr
    assert (tmp_path / "report" / "index.html").read_text() == "mine"
