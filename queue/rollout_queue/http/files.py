"""Answers with a large file."""

from fastapi.responses import FileResponse


class LargeFile(FileResponse):
    """A file, or the range of it that was asked for. It is read by the megabyte: each read is a call in
    another thread, and with starlette's 64 KB those calls cost most of the processor's time."""

    chunk_size = 2**20
