"""What is booked of a step beyond the tokens, which the engine's other tests see."""

from types import SimpleNamespace

from inkling_rocm.engine.books import Books
from inkling_rocm.engine.executor import StepResult
from inkling_rocm.engine.metrics import NoMetrics
from inkling_rocm.engine.step_plan import Flight


class Timed(list):
    """In place of SpeculationStats: the seconds of each round."""

    def book(self, drafted, accepted, seconds, **made):
        self.append(seconds)


def test_a_round_is_timed_from_the_step_before_it():
    """Not where none ran just before, nor where it computed prompts too."""
    scheduler = SimpleNamespace(cache=SimpleNamespace(publish=lambda captures: None))
    rounds = Timed()
    books = Books(scheduler, NoMetrics(), rounds)
    nothing = StepResult(tokens=[])
    books.book(Flight(batch=[]), nothing)
    books.book(Flight(batch=[]), nothing)
    books.book(Flight(batch=[("a prompt", 5)]), nothing)
    books.pause()
    books.book(Flight(batch=[]), nothing)
    books.book(Flight(batch=[]), nothing)
    assert [seconds is not None for seconds in rounds] == [False, True, False, False, True]
