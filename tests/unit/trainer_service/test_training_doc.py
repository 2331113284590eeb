"""Compares docs/training.md with the trainer: its worked example with results of the trainer's code, and its
tables with the settings."""

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

from docs.site.reference import settings_page
from gateway.settings import LimitSettings
from tests.support.tolerances import ulps
from tests.support.trainer_service.choices import choices
from tests.support.trainer_service.worked_example import DOCUMENT, VERSION, Example, integers, numbers, table
from trainer_service.algorithms.advantages import Advantage
from trainer_service.algorithms.aggregation import Aggregation
from trainer_service.algorithms.corrections import Correction, Mask
from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.policy_loss import Loss, LossSettings
from trainer_service.algorithms.returns import TokenAdvantage
from trainer_service.algorithms.rollouts import ShapingSettings
from trainer_service.algorithms.settings import PRESETS, AlgorithmSettings, preset
from trainer_service.groups.selection import select
from trainer_service.settings import TrainerSettings

pytestmark = pytest.mark.numeric

EXACT = 0.5e-4 + ulps(16)
"""Half a unit of the fourth decimal, and a few roundings of float32. No number in the example is above 2."""
BARE: dict[str, Any] = {"correction": "none", "masks": []}
GOLDEN = Path(__file__).parents[2] / "support/trainer_service/algorithms_golden.json"
FAMILIES: dict[str, Any] = {
    "advantage": choices(Advantage),
    "loss": choices(Loss),
    "correction": choices(Correction),
    "mask": choices(Mask),
}


@pytest.fixture(scope="module")
def example() -> Example:
    return Example.of_document()


def test_the_modes_of_training_are_settings_that_both_services_take() -> None:
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition("### Modes of training\n")
    rows = re.findall(r"^\| ([a-z ]+) \| `(\{.*?\})` \| `(\{.*?\})` \|", section.partition("\n#")[0], re.M)
    assert [name for name, *_ in rows] == ["synchronous", "one step off", "bounded", "partial rollout"]
    for name, algorithm, limits in rows:
        took = AlgorithmSettings.model_validate(yaml.safe_load(algorithm))
        versions = LimitSettings.model_validate(yaml.safe_load(limits)).staleness_versions
        assert versions is not None
        assert versions <= took.max_staleness, name


def close(told: Iterable[float], found: Iterable[float]) -> bool:
    return list(told) == pytest.approx(list(found), abs=EXACT)


def parameters(line: Any) -> dict[str, Any]:
    cell = yaml.safe_load("{" + line["parameters"] + "}")
    # YAML 1.1 takes 1e-6 for a word.
    return {
        name: float(value) if re.fullmatch(r"\de-\d", str(value)) else value for name, value in cell.items()
    }


def chosen(line: Any, of: str) -> dict[str, Any]:
    return {"name": line[of], **parameters(line)}


# The worked example


def test_each_session_of_the_example_ends_as_the_document_says(example: Example) -> None:
    found = example.settled.sessions
    assert {name: verdict.code for name, verdict in found.items()} == {
        line["session"]: line["verdict"] for line in table("session")
    }
    assert found["a"].version == VERSION + 1


def test_the_rewards_of_the_example_become_its_advantages(example: Example) -> None:
    rewards = {
        member.session_id: member.reward for each in example.judged.values() for member in each.group.members
    }
    advantages = {row.session_id: row.advantage for row in example.rows}
    for line in table("session"):
        alike = [float(each["reward"]) for each in table("session") if each["group"] == line["group"]]
        assert close([float(line["reward"])], [rewards[line["session"]] or 0.0])
        assert close([float(line["mean"])], [sum(alike) / len(alike)])
        if line["verdict"] == "trained":
            assert close([float(line["advantage"])], [advantages[line["session"]]])
        else:
            assert line["advantage"] == "-"
            assert line["session"] not in advantages


def test_the_live_group_of_the_example_makes_the_step_alone(example: Example) -> None:
    step = select((each.group for each in example.judged.values()), VERSION, example.algorithm, True)
    assert step.full
    assert [judged.group.group_id for judged in step.groups] == ["g"]
    assert [row.session_id for row in step.groups[0].rows] == [line["session"] for line in table("row")]


def test_the_rows_of_the_example_are_its_branches(example: Example) -> None:
    for line, row in zip(table("row"), example.rows, strict=True):
        assert line["session"] == row.session_id
        assert line["trains"].split() == list(row.turn_ids)
        assert integers(line["ids"]) == row.ids_L.tolist()
        assert integers(line["mask"]) == row.mask_L.tolist()
        versions = row.versions_L[row.mask_L == 1]
        first, last = int(versions.min()), int(versions.max())
        assert [int(line[name]) for name in ("total", "in flight", "in queue")] == [
            VERSION - first,
            last - first,
            VERSION - last,
        ]


def test_every_token_of_the_example_has_its_ratios_weight_loss_and_gradient(example: Example) -> None:
    lines = table("token")
    found, gradient_T = example.loss(example.algorithm)
    ids = [int(each) for row in example.rows for each in row.ids_L[row.mask_L == 1]]
    assert [int(line["id"]) for line in lines] == ids
    assert [int(line["token"]) for line in lines] == [*range(1, len(ids) + 1)]

    def column(name: str) -> list[float]:
        return [float(line[name]) for line in lines]

    assert close(column("rho"), example.tokens().log_rho.exp().tolist())
    assert close(column("weight"), found.weight_T.tolist())
    assert close(column("r"), found.ratio_T.tolist())
    assert close(column("loss"), found.per_token_T.tolist())
    assert close(column("gradient"), gradient_T.tolist())
    for words, flags_T in (
        ("capped", found.capped_T),
        ("clipped from above", found.clipped_high_T),
        ("clipped from below", found.clipped_low_T),
        ("dual clip", found.dual_T),
    ):
        assert [line[""].startswith(words) for line in lines] == flags_T.tolist()


def test_the_step_of_the_example_has_its_losses_and_gradients_whatever_its_packs(example: Example) -> None:
    """Through `optimise`: two epochs over its micro-batches."""
    _, model = example.step()
    assert close([float(line["loss"]) for line in table("epoch")], [sum(each) for each in model.losses[:2]])
    assert model.steps == len(table("epoch")) == example.algorithm.epochs
    gradients: dict[int, list[float]] = {}
    for line, batch, share in zip(table("micro-batch"), example.batches(), model.losses[1], strict=True):
        assert integers(line["rows"]) == list(dict.fromkeys(batch.rows_T.tolist()))
        assert (int(line["tokens"]), int(line["trained"])) == (len(batch.ids_N), len(batch.targets_T))
        assert close([float(line["share of the loss"])], [share])
    for batch, leaf_T in model.leaves:
        assert leaf_T.grad is not None
        for row, value in zip(batch.rows_T.tolist(), leaf_T.grad.tolist(), strict=True):
            gradients.setdefault(row, []).append(value)
    in_order = [value for row in sorted(gradients) for value in gradients[row]]
    assert close([float(line["gradient"]) for line in table("token")], in_order)


def test_the_metrics_of_the_example_are_those_of_the_document(example: Example) -> None:
    metrics, _ = example.step()
    told = {line["metric"]: float(line["value"]) for line in table("metric")}
    assert close(told.values(), [metrics[name] for name in told])


def test_every_advantage_of_the_example_is_right(example: Example) -> None:
    for line in table("advantage"):
        if issubclass(FAMILIES["advantage"][line["advantage"]], TokenAdvantage):
            assert line["of a, b, c"] == "-"
            continue
        rows = example.scored(AlgorithmSettings(advantage=chosen(line, "advantage")))
        found = {row.session_id: row.advantage for row in rows}
        assert close(numbers(line["of a, b, c"]), found.values()), line["advantage"]


@pytest.mark.parametrize("of", ["token 4", "token 7"])
def test_every_loss_of_the_example_is_right(of: str, example: Example) -> None:
    at = int(of.split()[1]) - 1
    for line in table("loss"):
        found, gradient_T = example.loss(LossSettings(loss=chosen(line, "loss"), **BARE))
        trained = len(gradient_T)
        told = [float(found.per_token_T[at]), trained * float(gradient_T[at])]
        assert close(numbers(line[of]), told), line["loss"]


def test_every_correction_of_the_example_is_right(example: Example) -> None:
    for line in table("correction"):
        found, _ = example.loss(LossSettings(correction=chosen(line, "correction"), masks=()))
        told = [float(line["token 3"]), float(line["token 6"])]
        assert close(told, found.weight_T[[2, 5]].tolist()), line["correction"]


def test_every_mask_of_the_example_leaves_out_what_the_document_says(example: Example) -> None:
    for line in table("mask"):
        settings = LossSettings(masks=(chosen(line, "mask"),))
        found, _ = example.loss(settings)
        left_out = [at + 1 for at, kept in enumerate(found.kept_T.tolist()) if not kept]
        assert integers(line["of the example"]) == left_out, line["mask"]


def test_every_kl_of_the_example_is_right(example: Example) -> None:
    for line in table("kl"):
        tokens = example.tokens()
        found_T = KLS[line["kl"]](tokens.lp_new_T, tokens.reference(), tokens.lp_prox_T)
        (gradient_T,) = torch.autograd.grad(found_T.sum(), tokens.lp_new_T)
        assert close(numbers(line["token 4"]), [float(found_T[3].detach()), float(gradient_T[3])]), line["kl"]


def test_every_aggregation_of_the_example_is_right(example: Example) -> None:
    for line in table("aggregation"):
        settings = LossSettings(aggregation=Aggregation(mode=line["aggregation"], **parameters(line)))
        found, _ = example.loss(settings)
        assert close([float(line["of the example"])], [float(found.loss.detach())]), line["aggregation"]


# The tables of settings


def told(of: str) -> set[str]:
    names = [line[of] for line in table(of)]
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("preset", set(PRESETS)),
        ("kl", set(KLS)),
        ("aggregation", set(get_args(Aggregation.model_fields["mode"].annotation))),
        *((family, set(kinds)) for family, kinds in FAMILIES.items()),
    ],
)
def test_the_tables_have_exactly_the_names_that_can_be_set(of: str, names: set[str]) -> None:
    assert told(of) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_document_has_all_parameters_with_their_defaults(family: str) -> None:
    for line in table(family):
        model = FAMILIES[family][line[family]]
        values = parameters(line)
        assert set(values) == set(model.model_fields) - {"name"}, line[family]
        model(**chosen(line, family))
        if line[family] == "rejection":  # it has no default bounds
            continue
        for name, value in values.items():
            field = model.model_fields[name]
            assert field.is_required() or field.default == value, f"{line[family]}: {name}"


def test_the_presets_are_what_the_document_says() -> None:
    for line in table("preset"):
        made = AlgorithmSettings(preset=line["preset"])
        assert line["advantage"] == (made.advantage.name if made.loss.uses_advantages else "-")
        assert line["loss"] == made.loss.name
        assert line["correction"] == made.correction.name
        assert line["masks"] == (" ".join(mask.name for mask in made.masks) or "-")
        assert line["aggregation"] == made.aggregation.mode
        assert set(preset(line["preset"])) <= set(AlgorithmSettings.model_fields)


def options(model: type[BaseModel]) -> set[str]:
    """The words that fields accept, if a field accepts certain words only."""
    found: set[str] = set()
    for field in model.model_fields.values():
        if get_origin(field.annotation) is Literal:
            found |= {each for each in get_args(field.annotation) if isinstance(each, str)}
    return found


def test_every_word_that_a_setting_takes_is_in_the_document_or_in_the_settings_own_sentence() -> None:
    text = "\n".join([DOCUMENT.read_text(encoding="utf-8"), *settings_page()])
    models: list[type[BaseModel]] = [AlgorithmSettings, ShapingSettings, Aggregation]
    models += [kind for kinds in FAMILIES.values() for kind in kinds.values()]
    words = {word for model in models for word in options(model)}
    assert len(words) > 50
    assert not {word for word in words if not re.search(rf"(`|: |[.;] |`{word}|form: ){word}\b", text)}


WITHOUT_CASE = {"none", "forward_kl", "kdrl", "cross_entropy"}
"""Formulas that other tests compare."""


def test_the_golden_cases_that_code_and_document_name_exist_and_every_formula_has_one() -> None:
    golden = {case["id"] for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]}
    named = r"`((?:adv|is|loss|mask|kl|prox|reward|opd)\.(?!coefficient|target|horizon|reference)[\w.]+)`"
    assert set(re.findall(named, DOCUMENT.read_text(encoding="utf-8"))) <= golden
    for name, kind in [pair for kinds in FAMILIES.values() for pair in kinds.items()]:
        cases = set(re.findall(named, inspect.getsource(kind)))
        assert cases <= golden, name
        assert bool(cases) == (name not in WITHOUT_CASE), name
    modes = get_args(Aggregation.model_fields["mode"].annotation)
    wanted = [*(f"kl.{name}" for name in KLS), *(f"agg.{mode}" for mode in modes)]
    wanted[-1] = "agg.token_mean_fixed_denom"  # of fixed_denominator
    assert not [start for start in wanted if not any(case.startswith(start) for case in golden)]


REFUSED = {
    "{loss: dppo}": "takes its ratio to the policy that sampled, and tis_token would correct for it a second",
    "{stale: correct, correction: none}": "trains old tokens with the weight of a correction, and there",
    "{prox: loglinear, epochs: 2}": "approximates what a pass before the step computes, and the step",
    "{mini_batches: 32}": "32 are more than the rows that a step waits for",
    "{kl: {estimator: k1, coefficient: 0.001}}": "the gradient of k1 is 1 for every policy, so as a loss it",
    "{kl: {reference_every_steps: 10}}": "nothing uses the reference; set kl.coefficient",
    "{kl: {target: 0.1}}": "target multiplies the coefficient, so the first one must be above 0",
    "{stale: correct, max_staleness: 0}": "may train tokens of older versions, and max_staleness: 0",
    "{loss: importance_sampling, correction: none, masks: [], prox: loglinear}": "computes lp_prox, which no",
    "{shaping: {turn_discount: 0.9}}": "turn_discount rewards turns, and drgrpo compares whole rollouts",
    "{shaping: {kl_in_reward: 0.01}}": "kl_in_reward rewards tokens, and drgrpo compares whole rollouts",
    "{advantage: {name: gdpo, weights: {answer: 1}}, shaping: {length_penalty: {turns: 0.1}}}": "gdpo "
    "compares the parts of a reward, and a length penalty changes only their sum",
    "{masks: [{name: product, low: 1.1, high: 2}]}": "leaves out 1, the ratio of equal policies",
    "{masks: [{name: rejection, level: seq_max, estimator: k1, low: 0.5, high: 2}]}": "k1 has a sign, so its "
    "maximum is no measure of distance",
    "{aggregation: {mode: fixed_denominator}}": "denominator belongs to fixed_denominator, which needs it",
    "{algorithm: {preset: opd}}": "loss ref_kl needs a teacher; set its url",
    "{algorithm: {advantage: gae}}": "advantage gae needs a critic; set it, {} is enough",
    "{dtype: bfloat16, zero_stage: 0}": "bfloat16 needs zero_stage 1, 2 or 3",
}


@pytest.mark.parametrize("given", REFUSED)
def test_settings_that_contradict_each_other_are_refused_with_a_sentence(given: str) -> None:
    fields = yaml.safe_load(given)
    model: Any = AlgorithmSettings if set(fields) <= set(AlgorithmSettings.model_fields) else TrainerSettings
    path = {} if model is AlgorithmSettings else {"model_path": "model"}
    with pytest.raises(ValidationError) as refusal:
        model(**path, **fields)
    assert REFUSED[given] in str(refusal.value)


def test_every_link_of_the_document_leads_somewhere() -> None:
    for name, anchor in re.findall(r"\]\(([\w.]*)#?([\w-]*)\)", DOCUMENT.read_text(encoding="utf-8")):
        target = DOCUMENT.with_name(name) if name else DOCUMENT
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        assert not anchor or anchor in slugs, f"{name}#{anchor}"
