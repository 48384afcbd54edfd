"""Optimizers: hyper-parameters, the state of a parameter, the bytes that an update moves, and the class in torch.

`[optimizer]`, predictions, training and checkpoints read the class that the optimizer's name stands for, and nothing
else says what an optimizer is. Each says it by the role of a weight, and a `RoleOptimizer` leaves some roles to another
optimizer. `register_optimizer` takes further ones.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.refusals import Refusal
from dtlayout.base.validators import Ranged, ranged
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES, Format
from dtlayout.spec.roles import ROLES, Role

_SCHEDULE = ("min_lr_ratio", "warmup_steps", "decay_steps", "max_norm")
"""Keys that count for all weights of a model, whichever optimizer updates them."""
StateFormat = Literal["", "bfloat16", "float32", "int8"]
"""Formats of [optimizer] state_format; the empty one is that of the parameters."""
StateName = Format | Literal["int8"]
"""Formats of a tensor of state."""
_STATE_BYTES: dict[str, float] = {**BYTES, "int8": 1 + 4 / 256}
"""Bytes of an element of state; int8 has a scale in fp32 for 256 elements, as bitsandbytes and torchao do."""
_TRAINED_STATE: tuple[StateFormat, ...] = ("", "bfloat16")
"""Formats in which our own trainer keeps the state; others can only be predicted."""
STATE_FORMAT = "state_format"
"""The key of an optimizer that says the format of its state."""
_BF16_SPACING = 2.0**-8
"""Largest relative change of a number that can round to nothing in bf16, which keeps eight bits of it."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Ranged, section="optimizer"):
    """An optimizer with its hyper-parameters, each a key of [optimizer]; linear warm-up and cosine decay go with all.

    Every optimizer is a subclass, and a frozen dataclass too.
    """

    name: str = ""
    """Name of the optimizer; each has keys of its own."""
    lr: float = ranged("must be above 0 and finite", 3e-4)
    """Learning rate at the end of the warm-up."""
    min_lr_ratio: float = ranged("must lie between 0 and 1", 0.1)
    """Learning rate at the end of the decay, as a share of `lr`."""
    warmup_steps: int = ranged("must not be negative", 0)
    """Steps over which the learning rate grows to `lr`."""
    decay_steps: int = ranged("must not be negative", 0)
    """Steps, those of the warm-up included, at whose end the learning rate has fallen; 0 for those that `train.steps`
    was when the run began, which a checkpoint keeps."""
    weight_decay: float = ranged("must not be negative", 0.0)
    """Decay of the weights that decay: matrices; norms and biases have none."""
    max_norm: float = ranged("must be above 0", 1.0)
    """Global gradient norm to clip at; infinite never clips."""

    torch_class: ClassVar[str]
    """torch's class, "module:name", imported where a run is built. It takes parameter groups, each with a
    `weight_decay`, then `lr` and `torch_arguments`."""
    step_bytes: ClassVar[int] = 0
    """Bytes of the counter `step` that torch keeps for each tensor; 0 where there is none."""
    decayed_roles: ClassVar[frozenset[Role]] = frozenset(ROLES) - {"vector"}
    """Roles of the weights that weight decay pulls at."""
    needs_whole_weights: ClassVar[bool] = False
    """Whether an update is right only where a rank has a weight's whole gradient; other layouts are refused then."""

    computes_in_bf16: ClassVar[bool] = False
    """Whether an update multiplies matrices in bf16, whatever the format of the parameters up to fp32."""

    @staticmethod
    def parse(table: Any, name: str) -> "Optimizer":
        """The optimizer that a table's `name` says, AdamW by default; InvalidConfig with every problem."""
        keys = table if isinstance(table, dict) else {}
        wanted = find_optimizer(keys.get("name", AdamW.name))
        try:
            return toml.parse(table, wanted, name)
        except InvalidConfig as error:
            problems = [_name_table(problem, name) for problem in error.problems]
            raise InvalidConfig([_name_owner(problem, keys, name, wanted) for problem in problems]) from None

    @property
    def given(self) -> dict[str, Any]:
        """Keys whose values are not the usual ones, those of a nested optimizer as rest.KEY."""
        usual, found = type(self)(), dict[str, Any]()
        for each in fields(self):
            value, default = getattr(self, each.name), getattr(usual, each.name)
            if isinstance(value, Optimizer):
                own = {"name": value.name} if value.name != default.name else {}
                found |= {f"{each.name}.{key}": kept for key, kept in (own | value.given).items()}
            elif value != default:
                found[each.name] = value
        return found

    @property
    def torch_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `torch_class`."""
        return {}

    @property
    def state(self) -> dict[str, StateName | None]:
        """Tensors that are kept for each parameter, in its shape: torch's name → format, None for the parameter's."""
        return {}

    @property
    def update_bytes(self) -> float:
        """Bytes read and written for each parameter by an update in fp32.

        By default one kernel reads the gradient, and reads and writes the parameter and its state.
        """
        return 4 + 2 * (4 + self.state_bytes(4))

    def state_bytes(self, parameter_bytes: int) -> float:
        """Bytes of state for each parameter of so many bytes, `step_bytes` not counted."""
        return sum(_STATE_BYTES[kept] if kept else parameter_bytes for kept in self.state.values())

    def of_role(self, role: Role) -> "Optimizer":
        """The optimizer that updates weights of a role: this one takes all."""
        return self

    def state_of(self, role: Role) -> dict[str, StateName | None]:
        """The `state` that is kept of the weights of a role."""
        return self.of_role(role).state

    @property
    def parts(self) -> "tuple[Optimizer, ...]":
        """The optimizers that share a model, this one first."""
        return (self,)

    def decay_of(self, role: Role) -> float:
        """Weight decay of the weights of a role."""
        return self.weight_decay if role in self.decayed_roles else 0.0

    def layout_problems(self, layout: Layout) -> list[str]:
        """Reasons why updates would be wrong in a layout, one line each; empty if they are right."""
        splits = {"dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp}
        broken = ", ".join(f"{axis}={degree}" for axis, degree in splits.items() if degree > 1)
        return [
            f"optimizer.name={part.name} updates whole weights, which {broken} splits; use dp_replicate and pp instead"
            for part in self.parts
            if part.needs_whole_weights and broken
        ]


@dataclass(frozen=True, kw_only=True)
class RoleOptimizer(Optimizer):
    """An optimizer of the weights of some roles; another one updates the rest, in the same step.

    The norm that gradients are clipped at and the course of the learning rate are this one's, for all weights.
    """

    rest: Optimizer = field(default_factory=lambda: AdamW())
    """The optimizer of all other weights, a table with a name and keys of its own."""

    roles: ClassVar[frozenset[Role]]
    """Roles of the weights that this optimizer takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_roles(type(self))
        defaults = type(self.rest)()
        if wrong := [key for key in _SCHEDULE if getattr(self.rest, key) != getattr(defaults, key)]:
            keys = ", ".join(f"optimizer.rest.{key}" for key in wrong)
            raise InvalidConfig(f"{keys} would change nothing: say it in [optimizer], for all weights")

    def of_role(self, role: Role) -> Optimizer:
        return self if role in self.roles else self.rest.of_role(role)

    @property
    def parts(self) -> tuple[Optimizer, ...]:
        return (self, *self.rest.parts)


def _check_roles(optimizer: type[RoleOptimizer]) -> None:
    """Raise InvalidConfig if a class does not say which weights it takes, as a collection of words in `ROLES`."""
    roles = getattr(optimizer, "roles", frozenset[str]())
    if isinstance(roles, Collection) and not isinstance(roles, str) and roles and set(roles) <= set(ROLES):
        return
    given = f"has roles={roles!r}" if roles else "does not say whose weights it updates"
    raise InvalidConfig(
        f"optimizer {optimizer.name!r} {given}; give its class roles = frozenset({{...}}), some of {', '.join(ROLES)}"
    )


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, arXiv:1711.05101, fused into one kernel."""

    name: str = "adamw"
    weight_decay: float = ranged("must not be negative", 0.1)
    """Decay of matrices for each unit of learning rate; norms and biases have none."""
    beta1: float = ranged("must be at least 0 and below 1", 0.9)
    """Decay of the first moment."""
    beta2: float = ranged("must be at least 0 and below 1", 0.95)
    """Decay of the second moment."""
    eps: float = ranged("must be above 0 and finite", 1e-8)
    """Added to the root of the second moment."""
    state_format: StateFormat = ""
    """Format of both moments, or that of the parameters if it is empty. The parameters keep theirs. bfloat16 can be
    trained. Predicted are also float32, and int8 with a scale for 256 elements, beside which moments of the embedding
    are in float32 (bitsandbytes beneath Hugging Face's Trainer)."""

    step_bytes = 4

    @property
    def torch_class(self) -> str:  # type: ignore[override]
        """torch's own class, or ours where the moments have a format of their own."""
        return "dtlayout.training.coarse_state:CoarseAdamW" if self.state_format else "torch.optim:AdamW"

    def find_broken(self) -> list[Refusal]:
        """A refusal of a format that is unknown, or in which a moment would never fall."""
        return _find_lost(self.state_format, beta1=self.beta1, beta2=self.beta2)

    @property
    def torch_arguments(self) -> dict[str, Any]:
        own = {"state_format": self.state_format} if self.state_format else {"fused": True}
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, **own}

    @property
    def state(self) -> dict[str, StateName | None]:
        return {"exp_avg": self.state_format or None, "exp_avg_sq": self.state_format or None}

    def of_role(self, role: Role) -> Optimizer:
        return self.parts[-1] if role == "embedding" else self

    @property
    def parts(self) -> tuple[Optimizer, ...]:
        """This one, and beside moments in int8 the one with those of the embedding."""
        return (self, replace(self, state_format="float32")) if self.state_format == "int8" else (self,)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent; DTensor has no fused kernel for it, so that each operation is a pass over memory."""

    name: str = "sgd"
    lr: float = ranged("must be above 0 and finite", 1e-2)
    """Learning rate at the end of the warm-up."""
    momentum: float = ranged("must lie between 0 and 1", 0.9)
    """Share of the last update that goes into the next one."""
    state_format: StateFormat = ""
    """Format of the momentum, or that of the parameters if it is empty. The parameters keep theirs. bfloat16 can be
    trained; float32 and int8 are predicted."""

    @property
    def torch_class(self) -> str:  # type: ignore[override]
        """torch's own class, or ours where the momentum has a format of its own."""
        return "dtlayout.training.coarse_state:CoarseSGD" if self.state_format else "torch.optim:SGD"

    def find_broken(self) -> list[Refusal]:
        """A refusal of a format that is unknown, or in which the momentum would never fall."""
        return _find_lost(self.state_format, momentum=self.momentum)

    @property
    def torch_arguments(self) -> dict[str, Any]:
        own = {"state_format": self.state_format} if self.state_format else {}
        return {"momentum": self.momentum, "foreach": True, **own}

    @property
    def state(self) -> dict[str, StateName | None]:
        return {"momentum_buffer": self.state_format or None} if self.momentum else {}

    @property
    def update_bytes(self) -> float:
        """Weight decay and the update read two tensors and write one; so does momentum, after it was scaled.

        Those passes read the momentum three times and write it twice.
        """
        return 12 + 12 * (self.weight_decay > 0) + 5 * self.state_bytes(4)


def _find_lost(state_format: str, **decays: float) -> list[Refusal]:
    """A refusal of a format of state that is unknown, or that rounds away what one of some decays takes off."""
    if state_format not in (known := get_args(StateFormat)):
        what = f"optimizer.state_format={state_format!r} is unknown"
        return [Refusal("state_format", what, f"use one of {list(known)}")]
    return [
        Refusal(
            name,
            f"optimizer.{name}={decay:g} takes {1 - decay:.2%} off at a step, which bfloat16 can round to nothing, so "
            f"that the state never falls",
            f"use {name} up to {1 - _BF16_SPACING:.3f}, or leave out optimizer.state_format",
        )
        for name, decay in decays.items()
        if state_format == "bfloat16" and 0 < 1 - decay < _BF16_SPACING
    ]


def check_state_format(optimizer: Optimizer) -> list[Refusal]:
    """A refusal of a format of state that our own trainer does not have; other programs are predicted with it."""
    formats = (getattr(part, STATE_FORMAT, "") for part in optimizer.parts)
    kept = next((each for each in formats if each not in _TRAINED_STATE), None)
    if kept is None:
        return []
    what = f"optimizer.state_format={kept} can be predicted, not trained"
    return [Refusal(STATE_FORMAT, what, "use state_format=bfloat16, or leave it out")]


@dataclass(frozen=True, kw_only=True)
class Muon(RoleOptimizer):
    """Momentum that is made orthogonal by Newton-Schulz iteration, for matrices of blocks; one rank has each whole."""

    name: str = "muon"
    weight_decay: float = ranged("must not be negative", 0.1)
    """Decay of matrices for each unit of learning rate."""
    momentum: float = ranged("must be at least 0 and below 1", 0.95)
    """Share of the momentum that stays."""
    nesterov: bool = True
    """Whether the gradient is added to the momentum once more before it is made orthogonal."""
    steps: int = ranged("must be at least 1", 5)
    """Steps of the iteration."""
    eps: float = ranged("must be above 0 and finite", 1e-7)
    """Least Frobenius norm that a momentum is divided by."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the learning rate for a matrix of m rows and n columns: 0.2·√max(m, n), with which AdamW's learning
    rates fit, or √max(1, m/n)."""

    roles = frozenset({"matrix", "expert"})
    torch_class = "dtlayout.training.muon:ShardedMuon"
    computes_in_bf16 = True

    @property
    def torch_arguments(self) -> dict[str, Any]:
        keys = ("momentum", "nesterov", "steps", "eps", "adjust")
        return {key: getattr(self, key) for key in keys}

    @property
    def state(self) -> dict[str, StateName | None]:
        return {"momentum_buffer": None}

    @property
    def update_bytes(self) -> int:
        """Bytes that elementwise passes move; the iteration and what is sent for it are priced apart.

        Passes scale the momentum, add the gradient, look ahead, round to bf16, decay the weight, and add the update.
        """
        return 20 + 12 * self.nesterov + 6 + 8 * (self.weight_decay > 0) + 10

    def layout_problems(self, layout: Layout) -> list[str]:
        offloaded = (
            f"optimizer.name={self.name} iterates matrices on the device, which has no state with layout.offload"
        )
        problems = super().layout_problems(layout)
        if layout.offloads_state:
            problems.append(f"{offloaded}={layout.offload}; use layout.offload=none or activations")
        return problems


def _name_table(problem: str, name: str) -> str:
    """A problem of an optimizer's key, by the table in which that optimizer stands."""
    return problem if problem.startswith(name) else problem.replace("optimizer.", f"{name}.")


def _name_owner(problem: str, keys: Collection[str], name: str, wanted: type[Optimizer]) -> str:
    """A table's problem, which names the owner where the key is another optimizer's."""
    key = next((key for key in keys if problem.startswith(f"{name}.{key} is unknown;")), None)
    if key and issubclass(wanted, RoleOptimizer) and key in {f.name for f in fields(wanted().rest)}:
        return f"{name}.{key} is a key of {name}.rest, the optimizer of the other weights; say {name}.rest.{key}"
    owners = [owner for owner, kind in OPTIMIZERS.items() if key in {f.name for f in fields(kind)}]
    return f"{name}.{key} is a key of {name}.name={owners[0]}; name that, or leave {key} out" if owners else problem


OPTIMIZERS: dict[str, type[Optimizer]] = {AdamW.name: AdamW, SGD.name: SGD, Muon.name: Muon}


def register_optimizer(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Let configs and commands name this optimizer; a decorator too.

    InvalidConfig if its name is taken, or if a `RoleOptimizer` does not say its roles.
    """
    if issubclass(optimizer, RoleOptimizer):
        _check_roles(optimizer)
    if optimizer.name in OPTIMIZERS:
        raise InvalidConfig(f"an optimizer called {optimizer.name!r} is there already; register it under another name")
    OPTIMIZERS[optimizer.name] = optimizer
    return optimizer


def find_optimizer(name: str) -> type[Optimizer]:
    """The optimizer called `name`; InvalidConfig names them all if there is none."""
    if name not in list(OPTIMIZERS):  # what a file says may be no key of a table
        raise InvalidConfig(f"optimizer.name={name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
