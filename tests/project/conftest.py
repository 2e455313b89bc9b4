"""A cloud for the checks of VMs."""

from tests.services.compute.conftest import site  # noqa: F401 - a fixture
