"""Errors at the door: whatever a public call refuses, it refuses as this error and in these words.

One table, a file for each floor. The shape checks of the test run are off, so that the errors are those that users see.
"""

from __future__ import annotations

import pytest

from tests.doors import data, likelihoods, linalg, models, operators, posterior
from tests.doors.door import Door, Row

FLOORS = {
    "linalg": linalg,
    "data": data,
    "models": models,
    "likelihoods": likelihoods,
    "operators": operators,
    "posterior": posterior,
}
TABLE = {
    f"{floor}: {door.call}: {wrong}": (door, row)
    for floor, module in FLOORS.items()
    for door in module.DOORS
    for wrong, row in door.rows.items()
}


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(("door", "row"), TABLE.values(), ids=TABLE)
def test_a_wrong_argument_is_refused_by_name(door: Door, row: Row) -> None:
    call, error, words = row
    with pytest.raises(error, match=words):
        call(*door.given())


def test_no_row_hides_another() -> None:
    assert len(TABLE) == sum(len(door.rows) for module in FLOORS.values() for door in module.DOORS)
