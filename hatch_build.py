"""Build hook: the native CPU kernels are compiled into the package, where there is a C++ compiler.

Without one the package is built all the same: they are compiled at their first use, or torch computes alone.

The Python files of a checkout that is installed with `-e` are compiled, too, as installers do with a wheel's. Where
Python writes no bytecode itself, each start would compile them again, for half a second.
"""

import compileall
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src" / "quire"
BUILD = PACKAGE / "kernels" / "cpu" / "native_build.py"


class NativeKernelsHook(BuildHookInterface):
    """Compiles every variant of this architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            compileall.compile_dir(PACKAGE, quiet=2)  # in a folder that is not writable it does nothing
        spec = importlib.util.spec_from_file_location("native_build", BUILD)
        assert spec is not None and spec.loader is not None
        native_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native_build)
        self.app.display_info("compiling the native CPU kernels")
        libraries = native_build.compile_all()
        if not libraries:
            self.app.display_warning("no native CPU kernels were compiled: is there a C++ compiler?")
            return
        build_data["artifacts"].extend(str(path.relative_to(self.root)) for path in libraries)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
