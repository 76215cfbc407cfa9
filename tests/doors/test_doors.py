"""Errors at the door: whatever a public call refuses, it refuses as this error and in these words.

One table, a file for each shelf. The shape checks of the test run are off, so that the errors are those that users see.
"""

import pytest

from tests.doors import (
    data,
    evidence,
    figures,
    function_space,
    gp,
    infinite_width,
    likelihoods,
    linalg,
    models,
    operators,
    posterior,
    reduced_posterior,
    repriorisation,
    sampling,
    tired,
)
from tests.doors.door import Row

SHELVES = (
    linalg,
    data,
    models,
    likelihoods,
    operators,
    posterior,
    evidence,
    sampling,
    repriorisation,
    function_space,
    infinite_width,
    reduced_posterior,
    gp,
    figures,
    tired,
)
TABLE = {f"{door.call}: {wrong}": row for shelf in SHELVES for door in shelf.DOORS for wrong, row in door.rows.items()}


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_wrong_argument_is_refused_by_name(row: Row) -> None:
    call, *kind, words = row
    with pytest.raises(*(kind or [ValueError]), match=words):
        call()


def test_no_row_hides_another() -> None:
    assert len(TABLE) == sum(len(door.rows) for shelf in SHELVES for door in shelf.DOORS)
