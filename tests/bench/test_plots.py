"""The plots of the docs are drawn from the rows in the repository."""

from bench.engine.plot import plot as plot_sweep
from bench.prefix_cache.plot import plot
from bench.rows import RESULTS, read


def test_time_to_first_token(tmp_path):
    (file,) = RESULTS.glob("prefix_ttft*.jsonl")
    plot(read(file), tmp_path / "plots" / "plot.png")
    assert (tmp_path / "plots" / "plot.png").stat().st_size > 1000


def test_serving(tmp_path):
    plot_sweep(tmp_path / "plots" / "plot.png")
    assert (tmp_path / "plots" / "plot.png").stat().st_size > 1000
