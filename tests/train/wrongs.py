"""What can be wrong with what the trainer is given, what it says to that, and its exit code: for test_bad_input and the
table in docs/train.md, which `python -m tests.train.wrongs` renews."""

from __future__ import annotations

import json
import re

from launch_train.common.contract import Exit
from tests.command import ROOT
from tests.train.material import GPT, NOWHERE, OWN, TEXT, USUAL, Wrong, llama, own
from tests.train.wrongdata import DATA

SETTINGS: dict[str, Wrong] = {
    "key": Wrong(
        "an unknown setting",
        {"steps_": 3},
        "invalid run.config: steps_: unknown setting; did you mean steps?",
    ),
    "scheme": Wrong(
        "data in a bucket of another cloud",
        {"data": "s3://bucket/data"},
        "invalid run.config: data: invalid value 's3://bucket/data'; must be python-stdlib, synthetic, …",
    ),
    "batch": Wrong(
        "a batch size that the processes don't divide",
        {"batch_size": 3},
        "batch_size 3 is not a multiple of 2 processes; use for example 4",
    ),
    "micro": Wrong(
        "a micro-batch that doesn't divide a rank's share",
        {"batch_size": 4, "micro_batch_size": 4},
        "micro_batch_size 4 doesn't divide the 2 samples of each of 2 ranks; use a divisor or auto",
    ),
    "fp16": Wrong(
        "fp16 on a CPU",
        {"precision": "fp16"},
        "precision: fp16 needs a GPU; on a CPU use fp32, bf16 or auto",
    ),
    "attention": Wrong(
        "an attention kernel that the device doesn't have",
        {"attention": "cudnn"},
        "attention: cudnn is not available on cpu; use auto or flash or math",
    ),
    "flash": Wrong(
        "an attention kernel that doesn't support the model",
        {"attention": "flash", "model": {**GPT, "dropout": 0.1}},
        "attention: flash doesn't support this model's attention: Both fused kernels do not support non-zero dropout; "
        "use auto",
    ),
}

MODELS: dict[str, Wrong] = {
    "module": Wrong(
        "a missing module",
        {**OWN, "model": "nowhere.model:build"},
        "model: nowhere.model:build: no module nowhere in {here}, and none is installed",
    ),
    "lacking": Wrong(
        "a module that imports a missing package",
        {**OWN, "model": "lacking:build"},
        "model: lacking:build can't be imported at lacking.py:1: ModuleNotFoundError: No module named "
        "'no_such_package'; if no_such_package is a package, add it to image.requirements",
    ),
    "syntax": Wrong(
        "a module with a syntax error",
        {**OWN, "model": "broken:build"},
        "model: broken:build can't be imported at broken.py:1: SyntaxError: invalid syntax",
    ),
    "function": Wrong(
        "a function that the module doesn't define",
        {**OWN, "model": "mine:modle"},
        "model: mine:modle: mine.py has no modle; did you mean model?",
    ),
    "argument": Wrong(
        "a setting that the function doesn't accept",
        {**OWN, "model": {"name": "mine:model", "widht": 3}},
        "model: mine:model failed when it was called: TypeError: model() got an unexpected keyword argument 'widht'",
    ),
    "raises": Wrong(
        "a function that fails",
        {**OWN, "model": "mine:raises"},
        "model: mine:raises failed at mine.py:…: ValueError: no such depth",
    ),
    "no-model": Wrong(
        "a function that doesn't return a model",
        {**OWN, "model": "mine:text"},
        "model: mine:text returned a str, not a torch.nn.Module",
    ),
    "no-parameters": Wrong(
        "a model without parameters",
        {**OWN, "model": "mine:bare"},
        "model: mine:bare returned a ReLU without parameters",
    ),
    "loss": Wrong(
        "a loss that isn't a function",
        {**OWN, "loss": "mine:constant"},
        "loss: mine:constant: mine.py: constant is not a function (type: int)",
    ),
    "forward-raises": Wrong(
        "a forward pass that fails",
        own("raises"),
        "model: mine:model failed at mine.py:…: KeyError: 'colour'",
    ),
    "forward-exits": Wrong(
        "a forward pass that exits the process",
        own("exits"),
        "model: mine:model failed at mine.py:…: SystemExit: 3",
    ),
    "forward-leaves": Wrong(
        "a forward pass that exits the process in a later step",
        {**own("leaves"), "steps": 40},
        "model: mine:model exited at mine.py:…: SystemExit",
    ),
    "forward-vector": Wrong(
        "a forward pass that returns several numbers",
        own("vector"),
        "model: mine:model returned a tensor of the shape [3]; the trainer needs the mean loss, one number "
        "(`loss: my_pkg.losses:loss` makes one of a model's outputs)",
    ),
    "forward-number": Wrong(
        "a forward pass that doesn't return a tensor",
        own("number"),
        "model: mine:model returned a float for a batch; the trainer needs the mean loss, a tensor",
    ),
    "forward-detached": Wrong(
        "a loss without gradients",
        own("detached"),
        "model: mine:model returned a loss that depends on no parameter: no gradient leads from it (detach()?)",
    ),
    "memory": Wrong(
        "a model too large for one sample",
        own("memory"),
        "rank … is out of memory: CUDA out of memory. Tried to allocate 20.00 MiB: use a smaller model, "
        "micro_batch_size or block_size, activation_checkpointing: full, or parallel: fsdp",
        Exit.FAILED,
    ),
    "hf-lacking": Wrong(
        "a transformers model without the package transformers",
        llama(),
        "model: hf:… needs transformers, which can't be imported (…): pip install 'gcp-launch[hf]' here, "
        "and transformers in image.requirements for the cloud",
        env={"LACKING": "transformers"},
    ),
    "hf-type": Wrong(
        "an unknown type of transformers",
        {"model": "hf:lama"},
        "model: hf:lama: transformers … has no type lama; did you mean llama? a model of the hub is hf:ORG/NAME, or "
        "{name: hf:lama, pretrained: true}",
    ),
    "hf-setting": Wrong(
        "an unknown setting of the type",
        llama(hiden_size=3),
        "model.hiden_size: hf:llama has no such setting; did you mean hidden_size?",
    ),
    "hf-value": Wrong(
        "a value that transformers refuses",
        llama(num_attention_heads=3),
        "model: hf:llama: transformers can't build it: …The hidden size (16) is not a multiple of the number of "
        "attention heads (3).",
    ),
    "hf-hub": Wrong(
        "a model of the hub, without access to the hub",
        {"model": "hf:nobody/nothing", "data": TEXT},
        "model: hf:nobody/nothing: … can't be reached (…), and nothing is cached here; hf:TYPE (hf:llama) with "
        "settings needs no hub",
        env=NOWHERE,
    ),
    "hf-long": Wrong(
        "samples longer than the model accepts",
        llama(max_position_embeddings=4),
        "model: hf:llama takes 4 tokens at most (max_position_embeddings), and data.block_size is 8",
    ),
}

FOLDERS: dict[str, Wrong] = {
    "folder": Wrong(
        "a run folder that can't be used",
        {},
        "{here}/file/run/micro_batch.json can't be read: Not a directory",
        Exit.UNFIT,
        env={"LAUNCH_RUN_FOLDER": "{here}/file/run"},
    ),
    "gpus": Wrong(
        "GPUs that the installed PyTorch can't use",
        {},
        "this node has 8 GPUs (nvidia-smi), but torch … can't use them: "
        "it was built without CUDA, or for a newer driver",
        Exit.UNFIT,
        1,
        env={"LAUNCH_VISIBLE_GPUS": "8"},
    ),
    "another-run": Wrong(
        "a run folder with another run's checkpoint",
        {},
        "{run} belongs to another spec: model was {…}. Change it back to resume, or start a fresh run (--new, or "
        "another name)",
        before={"LAUNCH_CONFIG": json.dumps({**USUAL, "model": {**GPT, "n_embd": 4}})},
    ),
    "another-code": Wrong(
        "a checkpoint of a model whose parameters have changed",
        OWN,
        "checkpoints/… doesn't fit this code: Error(s) in loading state_dict for …: size mismatch for …",
        before={"WIDTH": "5"},
    ),
}

CASES: dict[str, Wrong] = {
    f"{kind}: {name}": case
    for kind, cases in (("settings", SETTINGS), ("model", MODELS), ("data", DATA), ("run", FOLDERS))
    for name, case in cases.items()
}

# --- The table ------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "train.md"
TABLE = re.compile(r"(<!-- bad input -->\n).*(<!-- end of bad input -->)", re.DOTALL)


def renewed(page: str) -> str:
    """The page with the table as it is now."""
    rows = ["| what is wrong | message | code |", "|---|---|---|"]
    rows += [f"| {case.what} | {_code(case.line)} | {int(case.exit)} |" for case in CASES.values()]
    return TABLE.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], page)


def _code(line: str) -> str:
    said = line.replace("{here}/", "").replace("{here}", "the code's folder").replace("{run}", "RUN_FOLDER")
    fence = "``" if "`" in said else "`"
    return f"{fence}{said}{fence}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
