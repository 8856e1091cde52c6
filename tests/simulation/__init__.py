from tests import conftest as conftest  # its settings of the process, before anything loads OpenMP
