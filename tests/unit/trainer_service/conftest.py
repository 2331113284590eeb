"""The fixture of trainer_service that all of these tests use."""

from tests.support.trainer_service.device import freed_memory  # noqa: F401 - pytest finds it here
