"""Errors as users meet them: their facts, their text, and copies of them."""

from __future__ import annotations

import inspect
import pickle

import pytest

from halfmq.client import errors

KINDS = [
    one
    for one in vars(errors).values()
    if inspect.isclass(one)
    and issubclass(one, errors.ClientError)
    and one is not errors.ClientError
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_its_facts_and_survives_pickling(kind: type[errors.ClientError]) -> None:
    """Spark and multiprocessing hand errors on so."""
    parameters = inspect.signature(kind).parameters.values()
    of_type = {"int": 7, "float": 1.5, "bool": True}
    given = [of_type.get(one.annotation, f"<{one.name}>") for one in parameters if one.kind != 3]
    error = kind(*given)
    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), vars(copy), copy.retriable) == (str(error), vars(error), error.retriable)
    assert "<" in str(error)
    assert "{" not in str(error)
