"""Every error of the package travels as itself."""

import pickle

import pytest

import kapell.protocol
from kapell.protocol import BatchFileError, ReadOnlyError, SchemaError, UnsafeValueError

ERRORS = [
    BatchFileError("rows.kapell", "it is cut short"),
    ReadOnlyError("add_"),
    SchemaError(["column 'a': missing", "column 'b': not expected"]),
    UnsafeValueError("column 'a', row 1", "Thing"),
]


def test_every_error_of_the_package_is_tried_here():
    public = [getattr(kapell.protocol, name) for name in kapell.protocol.__all__]
    assert {type(error) for error in ERRORS} == {
        value for value in public if isinstance(value, type) and issubclass(value, BaseException)
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_text_fields_and_notes_when_pickled(error):
    error.add_note("a note")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
