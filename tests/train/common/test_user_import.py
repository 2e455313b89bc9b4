"""The user's own functions: found, called, and what goes wrong in them told in one line.

The refusals that tests.train.wrongs has for the whole trainer are not here again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.user_import import UserFunction, load_function
from launch_train.models import build_model
from launch_train.models import user_model as own

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules of the user's by name, into the folder that the node says is theirs."""
    monkeypatch.setenv(contract.CODE, str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def written(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    yield written
    for name in set(sys.modules) - before:
        if name.startswith("mine"):
            del sys.modules[name]


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_in_a_package_is_called_with_its_settings(write: Write) -> None:
    write(mine_a__model="def build(width, depth=2):\n    return width * depth\n")
    assert load_function("mine_a.model:build")(width=3) == 6


def test_the_users_code_comes_behind_pythons_own_modules(write: Write) -> None:
    write(queue="def build(): return 1\n")
    said = refused(lambda: load_function("queue:build", "model"))
    own = "queue.py can't be imported: Python's module queue shadows it; rename it"
    assert said == f"model: queue:build: {own}"


@pytest.mark.parametrize(("name", "whose"), [("launch_train__model", "launch's"), ("pytest", "the installed")])
def test_a_module_that_another_one_hides_is_named(write: Write, name: str, whose: str) -> None:
    write(**{name: "def build(): return 1\n"})
    said = refused(lambda: load_function(f"{name.replace('__', '.')}:build", "model"))
    assert f": {whose} module {name.partition('__')[0]} shadows it" in said


def test_a_folder_beside_a_module_of_its_name_hides_nothing(write: Write, tmp_path: Path) -> None:
    write(mine_b="def build(): return 1\n")
    (tmp_path / "mine_b").mkdir()  # of data, say: Python takes the module
    assert load_function("mine_b:build")() == 1


MODULES = {
    "mine_c": "x = 1\n\nraise ValueError('two\\nlines')\n",
    "mine_f": "def helper(): pass\n",
    "mine_g": "import sys\nsys.exit('no')\n",
    "mine_h": "from mine_c import x\n",
    "mine_i": "from mine_f import nothing\n",
    "mine_j__deep__model": "def build(): pass\n",
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine_c:build", "can't be imported at mine_c.py:3: ValueError: two lines"),
        ("mine_g:build", "can't be imported at mine_g.py:2: SystemExit: no"),
        ("mine_h:build", "can't be imported at mine_c.py:3: ValueError: two lines"),
        ("mine_i:build", "can't be imported at mine_i.py:1: ImportError: cannot import name 'nothing' from 'mine_f'"),
        ("mine_j.deep.modle:build", ": no module mine_j.deep.modle in {folder}, and none is installed; did "),
        ("mine_j.deep.modle:build", "did you mean mine_j.deep.model?"),
        ("mine_f.model:build", ": mine_f.py is a module, not a package with a model"),
    ],
)
def test_what_can_be_wrong_with_a_name(write: Write, tmp_path: Path, name: str, said: str) -> None:
    write(**MODULES)
    text = refused(lambda: load_function(name, "data"))
    assert text.startswith(f"data: {name}")
    assert said.format(folder=tmp_path) in text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.exit(3)", "failed at mine_k.py:2: SystemExit: 3"),
        ("assert False", "failed at mine_k.py:2: AssertionError"),
        ("import json; json.loads('{')", "failed at mine_k.py:2: JSONDecodeError: Expecting property name"),
    ],
)
def test_a_function_that_fails_says_where(write: Write, body: str, said: str) -> None:
    write(mine_k=f"def build(**settings):\n    {body}\n")
    assert said in refused(load_function("mine_k:build", "model"))


def test_errors_of_the_trainers_own_stay_what_they_are(write: Write) -> None:
    write(mine_m="from launch_train.common.errors import UnfitError\ndef build():\n    raise UnfitError('no GPU')\n")
    with pytest.raises(UnfitError, match="no GPU"):
        load_function("mine_m:build")()


# --- A model of the user's ------------------------------------------------------------------------------------------

MODEL = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(4, width)
    def forward(self, x, y=None):
        out = self.linear(x)
        return out if y is None else RESULT

def build(width=2):
    return Model(width)
def frozen():
    return Model(2).requires_grad_(False)
def nothing():
    pass
"""
LOSSES = """\
from torch.nn import functional
def loss(out, y):
    return functional.cross_entropy(out, y)
class Loss:
    pass
def several(out, y):
    return functional.cross_entropy(out, y, reduction="none")
"""
X, Y = torch.randn(3, 4), torch.tensor([0, 1, 1])


def made(config: dict[str, Any]) -> nn.Module:
    return build_model(parse(config))


def test_a_model_that_is_its_own_loss(write: Write) -> None:
    write(mine_n=MODEL.replace("RESULT", "out.square().mean()"))
    torch.manual_seed(3)
    model = made({"model": {"name": "mine_n:build", "width": 5}})
    torch.manual_seed(3)
    plain = nn.Linear(4, 5)
    assert model(X, Y).item() == plain(X).square().mean().item()
    assert [name for name, _ in model.named_parameters()] == ["model.linear.weight", "model.linear.bias"]
    sys.modules["mine_n"].build(width=5).load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    )


def test_a_model_with_a_loss_of_the_users(write: Write) -> None:
    write(mine_o=MODEL.replace("RESULT", "None"), mine_o_loss=LOSSES)
    model = made({"model": "mine_o:build", "loss": "mine_o_loss:loss"})
    assert model(X, Y).item() == nn.functional.cross_entropy(model.model(X), Y).item()  # type: ignore[operator]  # the user's model


def test_a_model_of_ours_with_a_loss_of_the_users(write: Write) -> None:
    """torch's own functions do too."""
    small = {"name": "resnet50", "width": 4, "image_size": 32, "num_classes": 4}
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 3])
    torch.manual_seed(1)
    ours = made({"model": small})(images, labels)
    torch.manual_seed(1)
    theirs = made({"model": small, "loss": "torch.nn.functional:cross_entropy"})(images, labels)
    assert ours.item() == theirs.item()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("frozen", "returned a Model with all parameters frozen"),
        ("nothing", "returned None, not a torch.nn.Module"),
    ],
)
def test_what_is_no_model(write: Write, function: str, said: str) -> None:
    write(mine_p=MODEL)
    assert refused(lambda: made({"model": f"mine_p:{function}"})) == f"model: mine_p:{function} {said}"


def test_a_loss_may_have_no_gradient_where_none_is_wanted(write: Write) -> None:
    write(mine_r=MODEL.replace("RESULT", "out.mean()"))
    with torch.no_grad():
        assert made({"model": "mine_r:build"})(X, Y).dim() == 0


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("mine_s_loss:several", "loss: mine_s_loss:several returned a tensor of the shape [3]; the trainer needs"),
        ("mine_s_loss:Loss", "loss: mine_s_loss:Loss is a class; it must be a function"),
        ("mine_s_loss:lost", "loss: mine_s_loss:lost: mine_s_loss.py has no lost; did you mean loss?"),
    ],
)
def test_what_is_no_loss_function(write: Write, loss: str, said: str) -> None:
    write(mine_s=MODEL, mine_s_loss=LOSSES)
    assert refused(lambda: made({"model": "mine_s:build", "loss": loss})(X, Y)).startswith(said)


def test_the_checks_are_no_breaks_of_a_compiled_graph(write: Write) -> None:
    write(mine_t=MODEL.replace("RESULT", "None"), mine_t_loss=LOSSES)
    model = made({"model": "mine_t:build", "loss": "mine_t_loss:loss"})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(X, Y).item() == model(X, Y).item()
    torch._dynamo.reset()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out


def test_what_fails_with_its_first_batch_is_one_line() -> None:
    """And later it is an error like any other: then something else has changed."""
    batch = torch.ones(3, 2), torch.ones(3, 1)
    with pytest.raises(
        UsageError, match=r"model: m:build failed .*TypeError.*without `loss` the trainer calls model\("
    ):
        own.ModelWithOwnLoss(Bare(), "model: m:build")(*batch)
    judged = own.ModelWithUserLoss(
        Bare(), UserFunction("m:loss", "loss", lambda outputs, targets: (outputs - targets).square().mean())
    )
    with pytest.raises(UsageError, match=r"model failed .*mat1 and mat2"):
        judged(torch.ones(3, 3), batch[1])
    assert judged(*batch).dim() == 0
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        judged(torch.ones(3, 3), batch[1])
    full = own.ModelWithOwnLoss(Full(), "model: m:build")
    with pytest.raises(torch.OutOfMemoryError):
        full(*batch)


class Full(Bare):
    def forward(self, *batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")
