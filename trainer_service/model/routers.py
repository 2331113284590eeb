"""The routers of a mixture of experts: replays the experts that an engine chose, and computes the metrics of
the load of experts from sums over the tokens of a step.

    MicroBatch ─ experts that the engine chose ─┐
    hidden states ─ router's logits ────────────┴─▶ chosen experts, weights from the router's own logits

A router computes everything as before, except that its `topk` over the experts returns the recorded choice
and the scores of that choice. So weights are those of the model's own formula, and logits have a gradient.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer_service.algorithms.sums import Sums
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import gathered
from trainer_service.rows.rows import MicroBatch

LOAD, PROBABILITY = "router/load/", "router/probability/"
"""How the vectors [E] of a layer are named: how often each of its experts was chosen, and the sum of each
expert's probability over the tokens."""


def router_metrics(step: Sums) -> dict[str, float]:
    """The load of the experts of a mixture, by the metrics' names; empty for other models.

    `router/aux_loss` is the auxiliary loss of Switch Transformers (2101.03961) as transformers computes it:
    E times the scalar product of two vectors over the experts, the mean number of times that a token chose
    an expert, and the mean probability. Both means are over the tokens of all layers. It is K, the number of
    experts of a token, if either vector is uniform."""
    loads = [vector for name, vector in step.vectors.items() if name.startswith(LOAD)]
    if not loads:
        return {}
    probability_E = torch.stack([step.vectors[name] for name in step.vectors if name.startswith(PROBABILITY)])
    return {
        "router/load_max": max(float(each.max() / each.mean()) for each in loads),
        "router/load_zero": sum(float((each == 0).double().mean()) for each in loads) / len(loads),
        "router/aux_loss": float(len(loads[0]) * (mean_load(step) @ probability_E.sum(0))),
    }


def mean_load(step: Sums) -> Tensor:
    """[E] float64: how often each expert was chosen, divided by the square of the number of tokens, each of
    which counts once a layer. The auxiliary loss is E times the scalar product of this vector and the sum of
    the experts' probabilities."""
    loads = torch.stack([vector for name, vector in step.vectors.items() if name.startswith(LOAD)])
    return loads.sum(0) / step.counts["router/entropy"] ** 2


ROUTER = re.compile(r"Top[kK]Router$")
"""How transformers names the classes of routers that take the experts with the highest scores."""
LAYER = re.compile(r"\.layers\.(\d+)\.")
PROBE_TOKENS = 5
MEANS, AGREEMENT = ("router/entropy", "router/replayed"), "router/agreement"


class RoutersUnknown(Exception):
    """A router does not choose its experts in the way that this module knows. The message says which."""


class _LayerSums(NamedTuple):
    """Sums over a layer's tokens, on the device."""

    tokens: int
    sums: Tensor
    """The sum of entropies in nats, the number of replayed tokens, and how many of their experts the model
    would have chosen itself."""
    load_E: Tensor
    """How often each expert was chosen."""
    probability_E: Tensor
    """The sum of each expert's probability."""


class RoutedPass:
    """One forward pass over N tokens: the experts to replay, and sums over the routing of all layers."""

    def __init__(self, experts_NW: Tensor | None, top_k: int, learns: bool = False) -> None:
        """`experts_NW` are the layers' experts, one layer after the other; negative where none are known.
        `learns` keeps the gradient of the probabilities."""
        self.learns = learns
        self._experts_NLK = None if experts_NW is None else experts_NW.view(len(experts_NW), -1, top_k)
        self._top_k = top_k
        self._layers: dict[int, _LayerSums] = {}
        self.probabilities: dict[int, Tensor] = {}
        """The sum [E] of each expert's probability over the tokens, by layer, with a gradient."""

    def choice(self, layer: int, own_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """The experts [N, K] of a layer, and [N] bool: whether they are recorded ones. A record that a router
        cannot have made, such as zeros for a layer that the engine did not record, is not replayed."""
        if self._experts_NLK is None:
            return own_NK, torch.zeros_like(own_NK[:, 0], dtype=torch.bool)
        recorded_NK = self._experts_NLK[:, layer].to(own_NK)
        ordered_NK = recorded_NK.sort(1).values
        known_N = (ordered_NK[:, 0] >= 0) & (ordered_NK[:, -1] < experts)
        known_N &= (ordered_NK[:, 1:] != ordered_NK[:, :-1]).all(1)
        return torch.where(known_N[:, None], recorded_NK, own_NK), known_N

    @torch.no_grad()
    def measure(self, layer: int, choice: "_Choice") -> None:
        """Note a layer's routing. The backward pass calls a recomputed layer again, with the same result."""
        share_NE = choice.shares().detach().double()
        agrees_NK = (choice.chosen_NK[:, :, None] == choice.own_NK[:, None]).any(2)
        ones_M = share_NE.new_ones(choice.chosen_NK.numel())
        sums = torch.stack(
            [
                torch.special.entr(share_NE).sum(),
                choice.known_N.sum(),
                (agrees_NK & choice.known_N[:, None]).sum(),
            ]
        )
        load_E = torch.zeros_like(share_NE[0]).index_add_(0, choice.chosen_NK.flatten(), ones_M)
        self._layers[layer] = _LayerSums(len(share_NE), sums, load_E, share_NE.sum(0))

    def sums(self) -> Sums:
        """The sums over all layers."""
        layers = sorted(self._layers.items())
        entropy, replayed, agreeing = torch.stack([each.sums for _, each in layers]).sum(0).tolist()
        tokens = sum(each.tokens for _, each in layers)
        totals, counts = (
            {"router/entropy": entropy, "router/replayed": replayed},
            dict.fromkeys(MEANS, tokens),
        )
        if replayed:
            totals[AGREEMENT], counts[AGREEMENT] = agreeing, int(replayed) * self._top_k
        # Two transfers from the device, and not two for each layer.
        load_LE = torch.stack([each.load_E for _, each in layers]).cpu()
        probability_LE = torch.stack([each.probability_E for _, each in layers]).cpu()
        load = {f"{LOAD}{layer}": load_LE[row] for row, (layer, _) in enumerate(layers)}
        probability = {f"{PROBABILITY}{layer}": probability_LE[row] for row, (layer, _) in enumerate(layers)}
        return Sums(totals, counts, {}, {}, load | probability)


_current: ContextVar[RoutedPass | None] = ContextVar("_current", default=None)


class Routers:
    """All routers of a model. Each pass of the model inside `routing` replays a micro-batch's experts."""

    def __init__(self, model: Any, replays: bool = True, learns: bool = False) -> None:
        """Without `replays`, no records of experts are wanted. With `learns`, `aux_loss` has a gradient.
        Raises RoutersUnknown if the model has routers that cannot replay a choice exactly."""
        self._learns = learns
        found = {name: each for name, each in model.named_modules() if ROUTER.search(type(each).__name__)}
        self._found = {int(match[1]): found[name] for name in found if (match := LAYER.search(f".{name}"))}
        config = model.config.get_text_config()
        self._top_k = int(getattr(config, "num_experts_per_tok", None) or 0)
        self.width = int(config.num_hidden_layers) * self._top_k
        """How many experts a token has in its record. SGLang records all layers, also one without experts."""
        self.replayed_width = self.width if replays else 0
        self.last: RoutedPass | None = None
        """The last pass."""
        if not self._found or len(self._found) != len(found) or not self._top_k:
            raise RoutersUnknown(f"{type(model).__name__} has no routers whose experts could be replayed")
        for layer, router in self._found.items():
            _wrap(router, layer, self._top_k)
        for layer, router in self._found.items():
            with gathered(list(router.parameters())):
                _probe(router, layer, self._top_k)

    def sums(self) -> Sums:
        """The sums over the routing of the last pass."""
        assert self.last is not None  # noqa: S101 - there is no routing before the first pass
        return self.last.sums()

    def aux_loss(self, load_E: Tensor) -> Tensor:
        """The last pass' share of the auxiliary loss of the step, with a gradient. The shares of all passes
        add up to the loss. `load_E` is the `mean_load` of the step."""
        assert self.last is not None  # noqa: S101 - there is no routing before the first pass
        each = [probability_E.double() @ load_E for probability_E in self.last.probabilities.values()]
        return len(load_E) * torch.stack(each).sum()

    @contextmanager
    def routing(self, batch: MicroBatch, device: torch.device) -> Iterator[None]:
        """Inside, the model's pass over this micro-batch replays its experts."""
        experts = batch.experts_NW
        self.last = RoutedPass(
            None if experts is None else torch.from_numpy(experts).to(device), self._top_k, self._learns
        )
        token = _current.set(self.last)
        try:
            yield
        finally:
            _current.reset(token)


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpointed layer's pass, and of its recomputation in the backward pass, which
    replays the same experts. Torch calls this in the pass."""
    return nullcontext(), _again(_current.get())


@contextmanager
def _again(routed: RoutedPass | None) -> Iterator[None]:
    token = _current.set(routed)
    try:
        yield
    finally:
        _current.reset(token)


class _Choice(TorchFunctionMode):
    """Inside, `topk` over all experts of a layer returns the recorded experts where they are known."""

    def __init__(self, routed: RoutedPass, layer: int, top_k: int) -> None:
        super().__init__()
        self._routed, self._layer, self._top_k = routed, layer, top_k
        self.scores_NE: Tensor | None = None
        """The scores of all experts, not negative: softmax or sigmoid of the logits."""
        self.own_NK = self.chosen_NK = self.known_N = torch.empty(0)
        self.calls = 0

    def shares(self) -> Tensor:
        """[N, E]: the scores, made to add up to 1 for each token."""
        assert self.scores_NE is not None  # noqa: S101 - topk has been called
        return self.scores_NE / self.scores_NE.sum(1, keepdim=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in ("softmax", "sigmoid") and self.calls == 0:
            self.scores_NE = result
        if name != "topk" or args[0].dim() != 2 or result.indices.shape[1] != self._top_k:
            return result
        self.calls += 1
        if self.scores_NE is None or self.scores_NE.shape != args[0].shape:
            self.scores_NE = args[0].float().softmax(1)
        self.own_NK = result.indices
        self.chosen_NK, self.known_N = self._routed.choice(self._layer, self.own_NK, args[0].shape[1])
        return torch.return_types.topk((args[0].gather(1, self.chosen_NK), self.chosen_NK))


def _wrap(router: Any, layer: int, top_k: int) -> None:
    """Let the router choose the experts of the current pass. DeepSpeed's hooks are around `forward`."""
    own = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        routed = _current.get()
        if routed is None:
            return own(*args, **kwargs)
        with _Choice(routed, layer, top_k) as choice:
            outputs = own(*args, **kwargs)
        if choice.calls != 1:
            raise RoutersUnknown(f"{type(router).__name__} calls topk {choice.calls} times over its experts")
        if routed.learns:  # also when a layer is recomputed, which must make the same operations again
            routed.probabilities.setdefault(layer, choice.shares().sum(0))
        routed.measure(layer, choice)
        return outputs

    router.forward = forward


@torch.no_grad()
def _probe(router: Any, layer: int, top_k: int) -> None:
    """Raises RoutersUnknown unless the router takes a recorded choice, and its own one without a change."""
    name = type(router).__name__
    weight = next(router.parameters())
    hidden_NH = torch.ones(PROBE_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    hidden_NH *= torch.linspace(-1, 1, PROBE_TOKENS, dtype=weight.dtype, device=weight.device)[:, None]

    def outputs(experts_NK: Tensor | None) -> tuple[Tensor, ...]:
        experts_NW = None
        if experts_NK is not None:
            experts_NW = experts_NK.new_full((PROBE_TOKENS, (layer + 1) * top_k), -1)
            experts_NW[:, -top_k:] = experts_NK
        token = _current.set(RoutedPass(experts_NW, top_k))
        try:
            return tuple(router(hidden_NH))
        finally:
            _current.reset(token)

    try:
        first = outputs(None)
        own_NK = next(each for each in first if not each.is_floating_point())
        other_NK = (own_NK + 1) % first[0].shape[1]
        same, other = outputs(own_NK), outputs(other_NK)
    except RoutersUnknown:
        raise
    except Exception as error:
        raise RoutersUnknown(f"{name} cannot be called with hidden states alone: {error}") from error
    equal = all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    if not equal or not any(torch.equal(each, other_NK) for each in other):
        raise RoutersUnknown(f"{name} does not take its experts from topk over their scores")


def routers_of(model: Any, settings: ModelSettings) -> Routers | None:
    """The model's routers, if it has any. Raises SystemExit if a setting needs them, and they are unknown."""
    try:
        return Routers(model, settings.router_replay, settings.learns_routing)
    except RoutersUnknown as error:
        for name, needed in (
            ("router_replay", settings.router_replay),
            ("algorithm.router_aux_loss", settings.learns_routing),
        ):
            if needed:
                raise SystemExit(f"trainer.{name}: {error}") from error
        return None
