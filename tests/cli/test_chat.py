import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_runs import environment, headrace
from served import serve_parrot

from headrace.cli.chat import Conversation
from headrace.core.config import ServerConfig
from headrace.core.errors import HeadraceError


def test_a_conversation_streams_and_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_parrot() as server:
        conversation = Conversation(server.url, {"model": "default"}, None, "be brief")
        lines = "say [[hello there]]\n\n/nonsense\n[[again]]\n"
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        conversation.run()
        out, err = capsys.readouterr()
        assert out == "hello there\nagain\n"
        assert "unknown command /nonsense" in err
        assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert conversation.messages[2]["content"] == "hello there"
        monkeypatch.setattr(sys, "stdin", io.StringIO("/reset\n/exit\nnever [[read]]\n"))
        conversation.run()
        assert conversation.messages == [{"role": "system", "content": "be brief"}]
        assert capsys.readouterr().out == ""


def test_what_the_server_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_parrot(ServerConfig(api_key="secret")) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        with pytest.raises(HeadraceError, match="answered 401"):
            Conversation(server.url, {"model": "default"}, None, None).run()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with pytest.raises(HeadraceError, match="is the server there"):
        Conversation(server.url, {"model": "default"}, None, None).run()


def test_the_command_talks_to_a_server(tmp_path: Path) -> None:
    with serve_parrot() as server:
        words = ["chat", "--url", f"{server.url}/v1", "--system", "x", "--max-tokens", "50"]
        done = headrace(*words, home=tmp_path, stdin="[[one]]\n[[two]]\n")
        assert (done.returncode, done.stdout) == (0, "one\ntwo\n")
        done = headrace("chat", "--url", server.url.removeprefix("http://"), home=tmp_path, stdin="[[three]]\n")
        assert (done.returncode, done.stdout) == (0, "three\n")
        done = headrace("chat", "--url", server.url, "--model", "nobody", home=tmp_path, stdin="hi\n")
        assert done.returncode == 1
        assert "404" in done.stderr
        assert done.stderr.count("\n") == 1


def read_until(terminal: int, wanted: str, seconds: float = 30) -> str:
    """What the terminal shows, up to the first match of a regular expression."""
    seen, deadline = "", time.monotonic() + seconds
    while not re.search(wanted, seen):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} did not come; the terminal shows {seen!r}"
        seen += os.read(terminal, 4096).decode()
    return seen


def test_ctrl_c_stops_the_answer_and_only_that(tmp_path: Path) -> None:
    """On a real terminal, against a server that talks slowly and for long."""
    with serve_parrot(step=0.02) as server:
        ours, theirs = pty.openpty()
        run = [sys.executable, "-m", "headrace.cli", "chat", "--url", server.url, "--max-tokens", "2000"]
        process = subprocess.Popen(
            run,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(tmp_path, TERM="dumb"),
            start_new_session=True,
        )
        os.close(theirs)
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            read_until(ours, "> ")
            os.write(ours, b"talk\n")
            read_until(ours, r"talk\r\n")
            read_until(ours, "q")  # the walk over the letters has begun
            process.send_signal(signal.SIGINT)
            read_until(ours, r"\[stopped\]\s+> ")
            server.wait(lambda: not server.engine.tasks)  # the server has stopped working on it, too
            os.write(ours, b"[[still here]]\n")
            read_until(ours, r"\nstill here\r\n> ")
            os.write(ours, b"/exit\n")
            assert process.wait(20) == 0
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            os.close(ours)
