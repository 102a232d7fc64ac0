"""What rows of prompts ask."""

import pytest

from hf_dspark.prompts import prompt_of, user_turns


USER, ANSWER = {"role": "user", "content": "One"}, {"role": "assistant", "content": "x"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "row, prompt, turns",
    [
        ({"prompt": "One"}, "One", ["One"]),
        ({"prompt": [USER]}, [USER], ["One"]),
        ({"messages": [USER, ANSWER]}, [USER], ["One"]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER], ["One", "One"]),
        ({"turns": ["One", "Two"]}, "One", ["One", "Two"]),
        ({"prompt": None, "turns": ["One"]}, "One", ["One"]),
    ],
)
def test_forms(row, prompt, turns):
    assert prompt_of(row) == prompt and user_turns(row) == turns


@pytest.mark.parametrize(
    "row", [{}, {"text": "x"}, [1], {"prompt": " "}, {"prompt": 3}, {"messages": [ANSWER]}, {"messages": ["x"]}]
)
def test_what_asks_nothing_is_refused(row):
    for read in (prompt_of, user_turns):
        with pytest.raises(ValueError, match=r"Expected|must hold|asks nothing"):
            read(row)


def test_a_system_message_is_kept_or_refused():
    assert prompt_of({"messages": [SYSTEM, USER]}) == [SYSTEM, USER]
    with pytest.raises(ValueError, match="of the role system"):
        user_turns({"messages": [SYSTEM, USER]})
