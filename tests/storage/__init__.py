import pytest

# It is not named like a test file, and its assertions are to show both sides all the same.
pytest.register_assert_rewrite("tests.storage.full_contract")
