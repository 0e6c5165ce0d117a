"""Builds `infinity._aio` out of csrc/aio, `infinity._optim` out of csrc/optim and `infinity._decode` out of csrc/decode, each
with what it needs of csrc/base; everything else about the package stands in pyproject.toml.

The extensions link neither torch nor CUDA, so one build serves every torch. liburing is used where a test program
compiles and links against it, its archive rather than its library: what is built then runs where no liburing is. Without
either the other I/O backends are built alone.

Environment: INFINITY_DEV=1 turns warnings into errors and keeps asserts; INFINITY_TEST_BUILD=1 links tests/csrc/faulty into
`infinity._aio`, so that tests can make drives worse; INFINITY_BUILD_JOBS is the number of compilers at a time.
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from pybind11.setup_helpers import build_ext as pybind11_build_ext
from setuptools import setup

DEV = os.environ.get("INFINITY_DEV") == "1"
TEST_BUILD = os.environ.get("INFINITY_TEST_BUILD") == "1"


def sources_in(folder: str) -> list[str]:
    return sorted(
        str(path)
        for path in Path(folder).glob("*.cpp")
        if not path.stem.startswith("test_") and not path.stem.endswith("_test")
    )


# Relative to this file, as setuptools asks; all of them end up in the source distribution.
AIO_SOURCES = sources_in("csrc/aio")
AIO_BASE = [f"csrc/base/{name}.cpp" for name in ("crc32c", "error", "openmp", "process")]
AIO_FAULTY = sources_in("tests/csrc/faulty") if TEST_BUILD else []
OPTIM_SOURCES = sources_in("csrc/optim")
DECODE_SOURCES = sources_in("csrc/decode")
DECODE_BASE = [f"csrc/base/{name}.cpp" for name in ("openmp", "process", "thread_pool")]
OPTIM_BASE = [f"csrc/base/{name}.cpp" for name in ("crc32c", "openmp", "process", "thread_pool")]
HEADERS = sorted(str(path) for pattern in ("*.h", "*.hpp", "*.inc") for path in Path("csrc").rglob(pattern))
if TEST_BUILD:
    HEADERS.append("tests/csrc/faulty/faults.h")

# The flags and calls that the io_uring backend cannot do without: an older liburing counts as none.
LIBURING_PROBE = """
#include <liburing.h>
int main() {
  io_uring ring;
  if (io_uring_queue_init(2, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN)) return 1;
  return io_uring_submit_and_get_events(&ring) < 0;
}
"""


# The archive first. Some systems have none, or one that can't go into a shared object.
LIBURING = (["-l:liburing.a"], ["-luring"])


class BuildExt(pybind11_build_ext):
    def build_extensions(self) -> None:
        liburing = next((flags for flags in LIBURING if links(self.compiler.compiler_cxx, flags)), [])
        if not liburing:
            print("liburing (2.3 or newer) not found: building without io_uring; install liburing-dev to have it")
        for extension in self.extensions:
            if liburing and extension.name == "infinity._aio":
                extension.define_macros.append(("INFINITY_HAVE_LIBURING", "1"))
                extension.extra_link_args += liburing
        self.build_temp = str(self.objects_folder())
        super().build_extensions()

    def objects_folder(self) -> Path:
        """One folder per set of flags, so that objects of different flags never mix. It outlives an editable install,
        for which setuptools would take a temporary one, and lets the next build compile only what changed."""
        described = [*self.compiler.compiler_so, *self.compiler.compiler_cxx]
        for extension in self.extensions:
            described += [str(extension.define_macros), *extension.extra_compile_args, *extension.include_dirs]
        digest = hashlib.sha256("\0".join(described).encode()).hexdigest()[:12]
        return Path("build") / f"objects-{digest}"


def links(compiler: list[str], liburing: list[str]) -> bool:
    """Whether a shared object that uses liburing compiles and links."""
    flags = [flag for name in ("CPPFLAGS", "CXXFLAGS", "LDFLAGS") for flag in shlex.split(os.environ.get(name, ""))]
    flags += ["-shared", "-fPIC", "-Wl,-z,defs", *liburing]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(LIBURING_PROBE)
        command = [*compiler, "-std=c++17", str(source), *flags, "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def needs_recompile(object_path: str, source_path: str) -> bool:
    """Whether the source, or any header, is newer than its object."""
    compiled = Path(object_path)
    if not compiled.exists():
        return True
    return compiled.stat().st_mtime <= max(Path(path).stat().st_mtime for path in (source_path, *HEADERS))


def extension(name: str, sources: list[str]) -> Pybind11Extension:
    """Return an extension; all have the same flags, because they share objects. No contraction: csrc/optim says itself where a
    product and a sum are rounded once, as bitwise equality with torch requires. Symbols of archives are hidden: if a compiler
    links libstdc++ statically, its locales would be confused with those of numpy's libstdc++, and imports would crash."""
    warnings = ["-Wall", "-Wextra", "-Werror", "-UNDEBUG"] if DEV else []
    return Pybind11Extension(
        name,
        sources,
        depends=HEADERS,
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=["-O2", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", *warnings],
        extra_link_args=["-pthread", "-Wl,--exclude-libs,ALL"],
    )


if not AIO_SOURCES or not OPTIM_SOURCES or not DECODE_SOURCES:
    raise SystemExit("no sources in csrc: run this from the root of a complete checkout")

ParallelCompile("INFINITY_BUILD_JOBS", needs_recompile=needs_recompile).install()
EXTENSIONS = [
    extension("infinity._aio", [*AIO_SOURCES, *AIO_BASE, *AIO_FAULTY]),
    extension("infinity._optim", [*OPTIM_SOURCES, *OPTIM_BASE]),
    extension("infinity._decode", [*DECODE_SOURCES, *DECODE_BASE]),
]
setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildExt})
