# The rollout server, and SGLang in an environment of its own (its pins differ from ours).
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
# "cpu" or "cuda": which of deploy/engine/requirements-*.txt makes the engine's environment.
ARG ENGINE=cpu
# Empty takes torch from wherever pip is configured to look: a mirror, or the CUDA build of the public index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/engine deploy/engine
RUN python -m venv /engine && cd deploy/engine \
    && if [ "$ENGINE" = cuda ]; then \
        /engine/bin/pip install -r requirements-cuda.txt; \
    else \
        if [ -n "$TORCH_INDEX" ]; then \
            /engine/bin/pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements-cpu.txt)"; \
        fi \
        && /engine/bin/pip install -r requirements-cpu.txt \
        && /engine/bin/pip install --no-deps -r requirements-cpu-nodeps.txt; \
    fi
RUN python -m venv /venv
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py rollout > requirements.txt && /venv/bin/pip install -r requirements.txt
COPY . .
RUN /venv/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
# A new named volume takes over the owner of the directory that it covers: these belong to the service.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir \
    && install -d -o 10001 -g 10001 /model /var/lib/weir/policies /var/lib/weir/weights
COPY --from=build /engine /engine
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    WEIR_ROLLOUT_SERVER__HOST=0.0.0.0 WEIR_ROLLOUT_SERVER__ENGINE_PYTHON=/engine/bin/python
USER 10001
EXPOSE 8100 30000
CMD ["python", "-m", "rollout_server"]
