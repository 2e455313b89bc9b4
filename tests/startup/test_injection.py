"""Whatever a spec says stays text: through the plan, Google's types, the script and the command line of Docker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from google.cloud import compute_v1

from launcher.plan.container import expand
from launcher.testing.googlecloud.compute.service import parse_instance
from launcher.testing.googlecloud.protobufs import parse
from tests.plan.planning import planned, told
from tests.startup.shell import call, told_text

CANARY = "canary"
TOUCH = f"touch {CANARY}"
CORPUS = {
    "substitution": f"$({TOUCH})",
    "backticks": f"`{TOUCH}`",
    "double quotes": f'" ; {TOUCH} ; "',
    "single quotes": f"' ; {TOUCH} ; '",
    "newline": f"a\n{TOUCH}\nb\n",
    "carriage return": f"a\r\n{TOUCH}\r\n",
    "semicolon": f"; {TOUCH}",
    "and": f"&& {TOUCH}",
    "pipe": f"| {TOUCH}",
    "background": f"& {TOUCH} &",
    "redirection": f"> {CANARY}",
    "brace": "{a,b} ${HOME} $HOME ${IFS}",
    "arithmetic": f"$((a[$({TOUCH})]))",
    "array": f"a[$({TOUCH})]",
    "glob": "* ? [a-z] ~ !!",
    "unicode": "é\u2028𝟘\u202egnirts🚀",
    "controls": "".join(map(chr, [*range(1, 9), 11, 12, *range(14, 32), 127])),
    "format": "%s %n %(x)s {0} {}",
    "option": "-rf",
    "long option": "--privileged",
    "volume": "--volume=/:/host",
    "escaped expansion": "$$(X) $$",
    "backslashes": "\\ \\n \\' \\\\",
    "end of a document": "PYTHON\nEOF\n",
    "json": '"}],"kind":"work","x":[{"',
    "empty": "",
    "spaces": "  a  b  ",
    "64 KB": f"$({TOUCH})" * (65536 // len(f"$({TOUCH})")),
}
DOCKER = """
docker() {
  case $1 in
    run) shift; printf '%s\\0' "$@" >"$STATE/argv" ;;
    *) return 0 ;;
  esac
}
"""
ACCOUNT = "@p.iam.gserviceaccount.com"


def fields(text: str) -> dict[str, Any]:
    """`text` in every field of a spec that takes it and that reaches a VM, beside env and arguments."""
    word = text[:2000]  # a VM's metadata holds 256 KiB of all together
    plain = "".join(char for char in word if char.isprintable() and not char.isspace() and char != "@")
    return {
        "env": {"A": text},
        "run": {"command": [word or "x", word], "args": [word, "--", word]},
        "output": f"gs://b-b/{plain}",
        "identity": {"service_account": (plain or "x") + ACCOUNT, "network": plain, "subnetwork": plain},
        "vm": {"image": f"projects/p/global/images/{word.replace('/', '')}" if word.replace("/", "") else None},
        "machine": {"type": "l4", "gpus": 2},
        "provisioning": ["spot"],
        "zones": ["us-central1-a"],
    }


def bodies() -> list[dict[str, Any]]:
    """A request for each text of the corpus."""
    return [planned("vm", world={"run_id": "job-1"}, **fields(text)).attempts[0].request for text in CORPUS.values()]


def test_google_takes_the_requests_as_they_are() -> None:
    for body, text in zip(bodies(), CORPUS.values(), strict=True):
        parse_instance(body)
        assert told(body)["env"]["A"] == expand(text, {})


def test_of_several_vms_too() -> None:
    for text in CORPUS.values():
        known = fields(text)
        known["machine"] = {**known["machine"], "nodes": 2}
        body = planned("vm", **known).attempts[0].request
        parse(body, compute_v1.BulkInsertInstanceResource.pb()(), "resource")
        assert told(body)["env"]["A"] == expand(text, {})


def test_the_container_gets_exactly_what_the_spec_says(tmp_path: Path) -> None:
    env = {f"V{number}": text for number, text in enumerate(CORPUS.values())}
    texts = [text for text in CORPUS.values() if text and len(text) < 65_000]
    known = fields(TOUCH)
    plan = planned("vm", world={"run_id": "job-1"}, **{**known, "env": env, "run": {"command": texts, "args": texts}})
    (tmp_path / "told.json").write_text(told_text(plan.attempts[0].request), encoding="utf-8")
    code = f'cd "$STATE"; NUMBER=42 NAME=job-1 PROJECT=my-project ZONE=us-central1-a; {DOCKER} start'
    ran = call(tmp_path, code)
    assert ran.returncode == 0, ran.stderr
    words = (tmp_path / "argv").read_bytes().decode().split("\0")[:-1]
    image = words.index(plan.image.uri if plan.image else "")
    assert words[image - 2 : image] == ["--entrypoint", "python"]
    expanded = [expand(text, env) for text in texts]
    assert words[image + 1 :] == ["-m", "launch_train.node", "--command", "--", *expanded, *expanded]
    given = {words[at + 1] for at, word in enumerate(words[:image]) if word == "--env"}
    assert given >= {f"{name}={expand(text, env)}" for name, text in env.items()}
    options = words[:image]
    assert {word for at, word in enumerate(options) if word.startswith("-") and options[at - 1] != "--env"} == OPTIONS
    assert not list(tmp_path.rglob(CANARY))


def test_the_record_goes_to_its_own_place_and_says_what_was_said(tmp_path: Path) -> None:
    code = """cd "$STATE"; NUMBER=42 NAME=job-1 ZONE=z BOOTED=1 GENERATION=""
    request() { echo "$1 $2" >>"$STATE/asked"; printf 200; echo '{"generation": "7"}' >"$STATE/answer"; }
    for text in "$@"; do
      python3 -c 'import json, sys; print(json.dumps({"run_folder": f"gs://b-b/{sys.argv[1]}"}))' "$text" >told.json
      mapfile -d '' -t ITEM < <(told item 42)
      record 70 "$text" "$text" 0
      cat "$STATE/record.json" >>"$STATE/records"; echo >>"$STATE/records"
    done
    """
    texts = ["\n".join(CORPUS.values())[:60_000], *(CORPUS[name] for name in ("controls", "substitution", "json"))]
    ran = call(tmp_path, code, *texts)
    assert ran.stderr == ""
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [record["reason"] for record in records] == [text[:2000] for text in texts]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(texts)
    for line in asked:
        assert re.fullmatch(
            r"POST https://storage\.googleapis\.com/upload/storage/v1/b/b-b/o\?uploadType=media"
            r"&name=[A-Za-z0-9._~%-]*machines%2F42\.json&ifGenerationMatch=0",
            line,
        )
    assert not list(tmp_path.rglob(CANARY))


def test_what_is_pasted_by_people_is_quoted(tmp_path: Path) -> None:
    """The grant is a command that a person copies into a shell of their own."""
    grants = [told(body)["grant"] for body in bodies()]
    code = 'cd "$STATE"; gcloud() { printf "%s\\0" "$@"; }; for one in "$@"; do eval "$one"; done'
    words = call(tmp_path, code, *grants).stdout.split("\0")
    assert words[:-1:6] == ["projects"] * len(grants)
    assert words[2::6] == ["my-project"] * len(grants)
    assert not list(tmp_path.rglob(CANARY))


OPTIONS = {
    *("--detach", "--name", "--gpus", "--ipc=host", "--network", "--ulimit", "--stop-timeout"),
    *("--log-driver", "--log-opt", "--env", "--entrypoint"),
}
