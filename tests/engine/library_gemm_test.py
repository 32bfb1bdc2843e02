"""A library's matrix product must fail our tests of exactness: runs one_result_test.cpp's control with the OpenBLAS inside numpy.

usage: library_gemm_test.py ENGINE_ONE_RESULT_TEST
"""
import os
import pathlib
import subprocess
import sys

import numpy

# numpy loads it itself, so that it finds its own libraries.
folder = pathlib.Path(numpy.__file__).parent.parent / "numpy.libs"
found = sorted(folder.glob("libscipy_openblas64_*.so"))
assert len(found) == 1, f"{folder} has {len(found)} OpenBLAS libraries"
environment = dict(os.environ, TEMPER_BLAS=str(found[0]), LD_LIBRARY_PATH=str(folder), OPENBLAS_NUM_THREADS="1")
sys.exit(subprocess.run([sys.argv[1], "--gtest_also_run_disabled_tests", "--gtest_filter=*ALibrarysProductIsSeen"], env=environment).returncode)
