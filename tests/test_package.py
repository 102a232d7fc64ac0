"""The package as others get it: light to import, lazily filled, and whole in a wheel."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
PUBLIC = (
    "AutoDrafter",
    "DFlashConfig",
    "DFlashDrafter",
    "DraftConfig",
    "DraftTrainer",
    "DSparkConfig",
    "DSparkDrafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "publish_drafter",
)
EXTRAS = ("accelerate", "datasets", "evaluate", "gguf", "gradio", "matplotlib", "peft", "rich", "trl", "typer")


# What a folder may import, besides itself and those below it.
LAYERS = {"checkpoints": 0, "models": 1, "generation": 2, "evaluation": 3, "training": 3, "hub": 4, "cli": 5}


def python(code: str, executable: str | Path = sys.executable, **kwargs) -> str:
    result = subprocess.run([executable, "-c", code], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_in_torch_and_transformers_only():
    """Compared with torch and transformers' models alone, which bring in accelerate where it is installed."""
    code = f"import sys, torch\n{{}}\nprint([name for name in {EXTRAS} if name in sys.modules])"
    assert python(code.format("import hf_dspark")) == python(code.format("from transformers import PreTrainedModel"))


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_point_downwards(folder):
    source = ROOT / "src" / "hf_dspark"
    for file in (source / folder).rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            found = re.match(r"from \.{2,3}(\w+)", line)
            other = found and found.group(1)
            if folder == "checkpoints" and other == "models":
                # Of what a drafter is, formats know its config.
                assert re.search(r"configuration_|\.loading ", line), f"{file}: {line}"
            elif other in LAYERS:
                assert LAYERS[other] <= LAYERS[folder], f"{file}: {line}"


def test_import_registers_the_model_types():
    code = "import hf_dspark, transformers; print([transformers.AutoConfig.for_model(t).model_type for t in {}])"
    names = ["dflash", "dspark", "eagle3"]
    assert python(code.format(names)).strip() == str(names)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name):
    import hf_dspark

    assert name in dir(hf_dspark)
    assert getattr(hf_dspark, name).__name__ == name


def test_unknown_name_is_an_attribute_error():
    import hf_dspark

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = hf_dspark.nothing_of_this_name


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment that has the wheel, and sees this one's packages but not this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    executable = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [sys.executable, "-m", "pip", "--python", executable, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    site = Path(python("import sysconfig; print(sysconfig.get_paths()['purelib'])", executable).strip())
    # A path line, unlike the .pth files in the folder it names, does not lead back to an editable checkout.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    return executable


@pytest.mark.slow
def test_wheel_is_whole(installed):
    code = "import hf_dspark, pathlib; print(pathlib.Path(hf_dspark.__file__).parent)"
    package = Path(python(code, installed, cwd=installed.parent).strip())
    assert package.is_relative_to(installed.parents[1])
    assert (package / "py.typed").is_file()
    assert (package / "hub" / "drafters" / "smollm2-135m-instruct-dspark").is_dir()
    assert (package / "hub" / "templates" / "model_card.md").is_file()
    for kind in ("*.py", "*.yaml"):
        sources = {file.relative_to(ROOT / "src" / "hf_dspark") for file in (ROOT / "src" / "hf_dspark").rglob(kind)}
        assert sources and sources <= {file.relative_to(package) for file in package.rglob(kind)}


@pytest.mark.slow
def test_wheel_decodes(installed, tiny_embedded_pair):
    command = [installed.with_name("hf-dspark"), "demo", "--prompts", "1", "--max-new-tokens", "8", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=installed.parent)
    assert result.returncode == 0, result.stderr
    assert "same text in 1 of 1" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_wheel_brings_the_space(installed):
    command = [installed.with_name("hf-dspark"), "space", "user/drafter", "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=installed.parent)
    assert result.returncode == 0, result.stderr
    for name in (ROOT / "spaces" / "dspark-demo").glob("*.*"):
        assert name.name in result.stdout
    assert "__pycache__" not in result.stdout
