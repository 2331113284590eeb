# The gateway: the base dependencies and the extra "gateway". No torch, no transformers.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /venv
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py gateway > requirements.txt && /venv/bin/pip install -r requirements.txt
COPY . .
RUN /venv/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir
COPY --from=build /venv /venv
# PYTHONSAFEPATH: what lies in the working directory is never imported instead of an installed module.
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp WEIR_GATEWAY__HOST=0.0.0.0
USER 10001
EXPOSE 8000
CMD ["python", "-m", "gateway"]
