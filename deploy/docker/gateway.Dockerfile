# The gateway: the base dependencies and the extra "gateway". No torch, no transformers.
FROM python:3.11-slim-bookworm AS wheel
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY deploy/requirements deploy/requirements
RUN pip install --no-deps --require-hashes -r deploy/requirements/build.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /venv
COPY deploy/requirements deploy/requirements
RUN /venv/bin/pip install --no-deps --require-hashes -r deploy/requirements/gateway.txt
COPY --from=wheel /dist /dist
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:3.11-slim-bookworm
# A new named volume gets the owner of the directory at its mount point, so the trainer's user owns this one.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir \
    && install -d -o 10001 -g 10001 /var/lib/weir/policies
COPY --from=build /venv /venv
# PYTHONSAFEPATH: no file in the working directory is imported in place of an installed module.
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp WEIR_GATEWAY__HOST=0.0.0.0
USER 10001
EXPOSE 8000
CMD ["python", "-m", "gateway"]
