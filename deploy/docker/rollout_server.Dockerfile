# The rollout server, and SGLang in an environment of its own, because SGLang pins other versions than Weir.
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
# "cpu" or "cuda": which build of torch, and which of the engine's locks.
ARG TORCH=cpu
# The index with the CPU build of torch. If it is empty, pip uses only the indexes that it is configured for.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/requirements deploy/requirements
RUN python -m venv /engine && cd deploy/requirements \
    && if [ "$TORCH" = cpu ]; then \
        /engine/bin/pip install --no-deps --require-hashes \
            ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r torch-cpu.txt; \
    fi \
    && /engine/bin/pip install --no-deps --require-hashes -r "engine-$TORCH.txt"
RUN python -m venv /venv \
    && /venv/bin/pip install --no-deps --require-hashes -r deploy/requirements/rollout_server.txt
COPY --from=wheel /dist /dist
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:3.11-slim-bookworm
# A new named volume gets the owner of the directory at its mount point, so the service's user owns these.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir \
    && install -d -o 10001 -g 10001 /model /var/lib/weir/policies /var/lib/weir/weights
COPY --from=build /engine /engine
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    WEIR_ROLLOUT_SERVER__HOST=0.0.0.0 WEIR_ROLLOUT_SERVER__ENGINE_PYTHON=/engine/bin/python
USER 10001
EXPOSE 8100 30000
CMD ["python", "-m", "rollout_server"]
