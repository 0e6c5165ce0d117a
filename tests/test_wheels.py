"""tools/build_wheels.py takes what belongs into a wheel, sees what another CPU may lack, and fails if it sees nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at instructions of x86-64"),
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("objdump")), reason="g++ or objdump is missing"),
]

PLAIN = "int plain(int a) { return a + 1; }\n"
NEWER = {
    "pclmul": "__m128i f(__m128i a) { return _mm_clmulepi64_si128(a, a, 0); }",
    "aes": "__m128i f(__m128i a) { return _mm_aesenc_si128(a, a); }",
    "bmi2": "unsigned long f(unsigned long a, unsigned long b) { return _pdep_u64(a, b); }",
    "avx": "void f() { _mm256_zeroupper(); }",
    "avx512f": "__m512i f(__m512i a) { return _mm512_add_epi64(a, a); }",
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheels", ROOT / "tools" / "build_wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheels = load()


def compile_into(tree: Path, name: str, text: str, *, target: str = "") -> None:
    source, compiled = tree / "csrc" / f"{name}.cpp", tree / "build" / "objects-1" / "csrc" / f"{name}.o"
    source.parent.mkdir(parents=True, exist_ok=True)
    compiled.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(f"#include <immintrin.h>\n{text}\n")
    flags = [f"-m{target}"] if target else []
    subprocess.run(["g++", "-O2", *flags, "-c", str(source), "-o", str(compiled)], check=True)


def test_a_wheel_holds_what_the_package_is_and_nothing_else(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (module,) = re.findall(r'^py-modules = \["(\w+)"\]$', project, re.M)
    names = [*wheels.TYPES, "infinity/__init__.py", f"{module}.py", "infinity_offload-1.dist-info/RECORD"]
    for more in ([], ["tests/conftest.py"]):
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for name in [*names, *more]:
                archive.writestr(name, "")
        with pytest.raises(wheels.WheelError, match=r"tests/conftest\.py") if more else contextlib.nullcontext():
            wheels.check_contents(tmp_path / "a.whl")


def test_the_wheel_that_is_tried_is_made_as_those_of_a_release() -> None:
    """A test of a wheel that is made in another way sees nothing of what fails in `make wheels`."""
    recipes = [
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for target in ("wheels", "test-wheel")
    ]
    assert all("tools/build_wheels.py" in recipe and "pip wheel" not in recipe for recipe in recipes)


def test_portable_objects_pass(tmp_path: Path) -> None:
    compile_into(tmp_path, "plain", PLAIN)
    wheels.check_instructions(tmp_path, builds=1)


@pytest.mark.parametrize("target", NEWER)
def test_instructions_that_another_cpu_may_lack_are_refused(target: str, tmp_path: Path) -> None:
    compile_into(tmp_path, "plain", PLAIN)
    compile_into(tmp_path, "newer", NEWER[target], target=target)
    with pytest.raises(wheels.WheelError, match=r"1 are, such as newer\.o: f\("):
        wheels.check_instructions(tmp_path, builds=1)


def test_a_dispatched_source_may_have_them_in_the_functions_named(tmp_path: Path) -> None:
    compile_into(tmp_path, "crc32c", "__m256d by_avx512(__m256d a) { return _mm256_add_pd(a, a); }", target="avx")
    wheels.check_instructions(tmp_path, builds=1)
    compile_into(tmp_path, "crc32c", "__m256d by_table(__m256d a) { return _mm256_add_pd(a, a); }", target="avx")
    with pytest.raises(wheels.WheelError, match="by_table"):
        wheels.check_instructions(tmp_path, builds=1)


def test_objects_that_are_not_seen_do_not_pass(tmp_path: Path) -> None:
    with pytest.raises(wheels.WheelError, match="0 builds"):
        wheels.check_instructions(tmp_path, builds=1)
    compile_into(tmp_path, "plain", PLAIN)
    (tmp_path / "csrc" / "other.cpp").touch()
    with pytest.raises(wheels.WheelError, match=r"objects-1/csrc/other\.o"):
        wheels.check_instructions(tmp_path, builds=1)


def test_functions_for_newer_cpus_in_which_nothing_is_seen_do_not_pass(tmp_path: Path) -> None:
    compile_into(tmp_path, "kernels_avx2", PLAIN)
    with pytest.raises(wheels.WheelError, match=r"kernels_avx2\.o"):
        wheels.check_instructions(tmp_path, builds=1)
