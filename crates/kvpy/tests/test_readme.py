"""The example of the README, as it stands."""

import pathlib
import re


def test_the_example_of_the_readme_runs() -> None:
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["layers"][0][6, :, :, :].shape == (2, 32, 64)
    assert names["chunks"].metrics()["cached_chunks"] == 1
