"""Token ids whose log-probabilities a client wants in the places of its prompt: `target_prompt_logprobs`.

Row i is about position i + 1, because nothing comes before the first token. A cell of -1 wants nothing.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

import msgspec
from pydantic import Field, model_validator

from gateway.errors import InvalidRequest
from gateway.rest.bodies import RestBody
from gateway.rest.tinker_api.wire import messages_pb2 as wire
from gateway.rest.tinker_api.wire.sparse import is_csr

FIELD = "target_prompt_logprobs"
NOTHING = -1
"""What stands in a cell that wants nothing."""
MOST_SCORES = 2**19
"""The engine scores each wanted id in every place from the first row on. So many scores are read, and so many
cells are answered."""
TOKEN_LIMIT = 2**31
Indices = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class TargetsBody(RestBody):
    """An int64 tensor as the SDK sends it: dense, or CSR with both lists of indices."""

    data: Annotated[list[Annotated[int, Field(ge=NOTHING, lt=TOKEN_LIMIT)]], Field(fail_fast=True)]
    dtype: Literal["int64"]
    shape: Indices | None = None
    sparse_crow_indices: Indices | None = None
    sparse_col_indices: Indices | None = None

    @model_validator(mode="after")
    def _has_a_layout(self) -> Self:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices come together")
        if self.shape is None or len(self.shape) != 2 or self.shape[1] < 1:
            raise ValueError("its shape is [len(prompt) - 1, K]")
        return self


class PromptTargets(msgspec.Struct, frozen=True):
    """The wanted ids of a prompt, in the layout in which they were asked."""

    ids: Sequence[int]
    shape: Sequence[int]
    rows: Sequence[int] | None = None
    """Where each row begins in `ids`, and the end, of a sparse tensor; None: it is dense."""
    columns: Sequence[int] = ()

    @property
    def candidates(self) -> tuple[int, ...]:
        """The wanted ids, each once."""
        return tuple(sorted(set(self.ids) - {NOTHING}))

    @property
    def start(self) -> int:
        """The first position for which an id is wanted."""
        return next(position for position, token in self._cells() if token != NOTHING)

    def scored(self, candidates: Sequence[Sequence[float]]) -> wire.Tensor:
        """The tensor of the answer: shape and layout of the question, 0 where nothing is wanted.

        `candidates`: by position, the log-probability of each of `self.candidates`.
        """
        column = {token: at for at, token in enumerate(self.candidates)}
        values = array(
            "f",
            (
                0.0 if token == NOTHING else candidates[position][column[token]]
                for position, token in self._cells()
            ),
        ).tobytes()
        tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=self.shape)
        if self.rows is None:
            tensor.dense = values
        else:
            tensor.sparse_csr.values = values
            tensor.sparse_csr.crow_indices = array("q", self.rows).tobytes()
            tensor.sparse_csr.col_indices = array("q", self.columns).tobytes()
        return tensor

    def _cells(self) -> Iterator[tuple[int, int]]:
        """The position and the id of each cell that is listed."""
        rows = self.rows or range(0, len(self.ids) + 1, self.shape[1])
        for position, (begin, end) in enumerate(pairwise(rows), 1):
            for at in range(begin, end):
                yield position, self.ids[at]


def prompt_targets(body: TargetsBody, length: int, vocab_size: int) -> PromptTargets:
    """The targets of a prompt of `length` tokens. Raises InvalidRequest for what cannot be scored."""
    count, k = body.shape or (0, 0)
    rows, columns = body.sparse_crow_indices, body.sparse_col_indices or []
    if count != length - 1:
        raise _refused(f"{count} rows, for a prompt of {length} tokens; there must be {length - 1}")
    if len(body.data) > MOST_SCORES:
        raise _refused(f"{len(body.data)} cells, of {MOST_SCORES} allowed: name ids in fewer places at once")
    if rows is None and len(body.data) != count * k:
        raise _refused(f"{len(body.data)} ids, for the shape {[count, k]}")
    if rows is not None and not is_csr(rows, columns, len(body.data), (count, k)):
        raise _refused("the indices of the sparse tensor contradict its shape")
    if max(body.data, default=NOTHING) >= vocab_size:
        raise _refused(f"an id lies outside the vocabulary of {vocab_size}")
    targets = PromptTargets(body.data, (count, k), rows, columns)
    if not targets.candidates:
        raise _refused("no id is wanted")
    scores = (length - targets.start) * len(targets.candidates)
    if scores > MOST_SCORES:
        message = f"{len(targets.candidates)} different ids in {length - targets.start} places are {scores}"
        raise _refused(f"{message} scores, of {MOST_SCORES} allowed: ask for fewer ids at once")
    return targets


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}: {message}", param=FIELD)
