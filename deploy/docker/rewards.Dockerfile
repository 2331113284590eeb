# The reward service: the base dependencies and the extra "rewards". No torch, no transformers.
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
COPY deploy/requirements deploy/requirements
# rouge-score is published as source. It is built with the tools of build.txt, which are removed afterwards.
RUN python -m venv /venv && cd deploy/requirements \
    && /venv/bin/pip install --no-deps --require-hashes -r build.txt \
    && /venv/bin/pip install --no-deps --no-build-isolation --require-hashes -r rewards.txt \
    && /venv/bin/pip uninstall -y hatchling wheel
COPY --from=wheel /dist /dist
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir
COPY --from=build /venv /venv
# PYTHONSAFEPATH: no file in the working directory is imported in place of an installed module.
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp WEIR_REWARDS__HOST=0.0.0.0
USER 10001
EXPOSE 8300
CMD ["python", "-m", "reward_service"]
