{{- /* What the values change in an object. Each template but the first two gets a dict: object, values, namespace, and
checksums, the hash of each ConfigMap by its name. It changes the object in place, and prints nothing. */ -}}

{{- /* Ends with a sentence if a value would change nothing. */ -}}
{{- define "weir.check" -}}
{{- $v := .Values -}}
{{- $of_fleet := dict "gateway.minReplicas" $v.gateway.minReplicas "gateway.maxReplicas" $v.gateway.maxReplicas
  "rolloutServer.minReplicas" $v.rolloutServer.minReplicas "rolloutServer.maxReplicas" $v.rolloutServer.maxReplicas
  "trainer.nodes" $v.trainer.nodes "trainer.gpus" $v.trainer.gpus "storage.sharedClassName" $v.storage.sharedClassName
  "ingress.host" $v.ingress.host "ingress.tlsSecret" $v.ingress.tlsSecret "ingress.className" $v.ingress.className
  "ingress.annotations" $v.ingress.annotations -}}
{{- range $name, $value := $of_fleet -}}
{{- if and $value (ne $v.overlay "fleet") }}{{ fail (printf "%s is a value of the overlay fleet, and overlay is %s" $name $v.overlay) }}{{ end -}}
{{- end -}}
{{- range $name, $value := $v.model -}}
{{- if and $value (eq $v.overlay "cpu-demo") (has $name (list "name" "revision" "tokenSecret")) }}{{ fail (printf "model.%s is no value of the overlay cpu-demo, which makes the demo's own model" $name) }}{{ end -}}
{{- end -}}
{{- if and $v.model.revision (not $v.model.name) }}{{ fail "model.revision needs model.name" }}{{ end -}}
{{- range $component, $section := dict "rewards" $v.rewards "fine-tuning" $v.fineTuning "backup" $v.backup -}}
{{- range $name, $value := $section -}}
{{- if and $value (not (has $component $v.components)) }}{{ fail (printf "%s.%s needs %s in components" (include "weir.value" $component) $name $component) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $size, $component := dict "backups" "backup" "fineTuning" "fine-tuning" -}}
{{- if and (get $v.storage.sizes $size) (not (has $component $v.components)) }}{{ fail (printf "storage.sizes.%s needs %s in components" $size $component) }}{{ end -}}
{{- end -}}
{{- range $section, $names := dict "gateway" $v.gateway "rolloutServer" $v.rolloutServer -}}
{{- if and (not (kindIs "invalid" $names.replicas)) (or $names.minReplicas $names.maxReplicas) }}{{ fail (printf "%s.replicas takes the place of minReplicas and maxReplicas" $section) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The name of the value for something with this name in Kubernetes. */ -}}
{{- define "weir.value" }}{{ camelcase . | untitle }}{{ end -}}

{{- define "weir.metadata" -}}
{{- $metadata := .object.metadata -}}
{{- if $metadata.namespace }}{{ $_ := set $metadata "namespace" .namespace }}{{ end -}}
{{- range $kind := list "labels" "annotations" -}}
{{- with index $.values $kind }}{{ $_ := set $metadata $kind (merge (dict) (default (dict) (get $metadata $kind)) .) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "weir.ConfigMap" -}}
{{- with get .object.data "weir.yaml" -}}
{{- $settings := (index $.values (include "weir.value" (trimPrefix "weir-" $.object.metadata.name))).settings -}}
{{- range $name, $own := fromYaml . -}}
{{- if $settings }}{{ $_ := set $.object.data "weir.yaml" (toJson (dict $name (mergeOverwrite $own $settings))) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "weir.PersistentVolumeClaim" -}}
{{- $_ := set .object.metadata "annotations" (merge (dict "helm.sh/resource-policy" "keep") (default (dict) .object.metadata.annotations)) -}}
{{- include "weir.claim" (dict "spec" .object.spec "name" .object.metadata.name "storage" .values.storage) -}}
{{- end -}}

{{- define "weir.claim" -}}
{{- with get .storage.sizes (include "weir.value" .name) }}{{ $_ := set $.spec.resources.requests "storage" . }}{{ end -}}
{{- $class := ternary .storage.sharedClassName .storage.className (has "ReadWriteMany" .spec.accessModes) -}}
{{- with $class }}{{ $_ := set $.spec "storageClassName" . }}{{ end -}}
{{- end -}}

{{- define "weir.Deployment" }}{{ include "weir.replicas" . }}{{ include "weir.pod" (merge (dict "of" .object.spec) .) }}{{ end -}}
{{- define "weir.CronJob" -}}
{{- with .values.backup.schedule }}{{ $_ := set $.object.spec "schedule" . }}{{ end -}}
{{- include "weir.pod" (merge (dict "of" .object.spec.jobTemplate.spec) .) -}}
{{- end -}}

{{- define "weir.StatefulSet" -}}
{{- $trainer := .values.trainer -}}
{{- if eq .object.metadata.name "redis" -}}
{{- include "weir.claim" (dict "spec" (first .object.spec.volumeClaimTemplates).spec "name" "redis" "storage" .values.storage) -}}
{{- end -}}
{{- include "weir.pod" (merge (dict "of" .object.spec) .) -}}
{{- if and (eq .object.metadata.name "trainer") (or $trainer.nodes $trainer.gpus) -}}
{{- $container := first .object.spec.template.spec.containers -}}
{{- with $trainer.nodes -}}
{{- $_ := set $.object.spec "replicas" . -}}
{{- $_ := set $container "args" (regexReplaceAll `--nnodes=\d+` (toJson $container.args) (printf "--nnodes=%d" (int .)) | fromJsonArray) -}}
{{- end -}}
{{- with $trainer.gpus -}}
{{- $_ := set $container.resources.limits "nvidia.com/gpu" . -}}
{{- $_ := set $container "args" (regexReplaceAll `--nproc-per-node=\d+` (toJson $container.args) (printf "--nproc-per-node=%d" (int .)) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A Job cannot be changed: its name follows from what it does, so that a changed one is another. */ -}}
{{- define "weir.Job" -}}
{{- $container := first .object.spec.template.spec.containers -}}
{{- with .values.model.name }}{{ $_ := set $container "args" (compact (list . $.values.model.revision)) }}{{ end -}}
{{- with .values.model.tokenSecret -}}
{{- $from := dict "secretKeyRef" (dict "name" . "key" "HF_TOKEN") -}}
{{- $_ := set $container "env" (append (default list $container.env) (dict "name" "HF_TOKEN" "valueFrom" $from)) -}}
{{- end -}}
{{- include "weir.pod" (merge (dict "of" .object.spec) .) -}}
{{- $_ := set .object.metadata "name" (printf "model-%s" (toJson .object.spec | sha256sum | trunc 10)) -}}
{{- end -}}

{{- define "weir.replicas" -}}
{{- $replicas := index .values (include "weir.value" .object.metadata.name) "replicas" -}}
{{- if not (kindIs "invalid" $replicas) }}{{ $_ := set .object.spec "replicas" $replicas }}{{ end -}}
{{- end -}}

{{- define "weir.HorizontalPodAutoscaler" -}}
{{- $section := index .values (include "weir.value" .object.metadata.name) -}}
{{- range $name := list "minReplicas" "maxReplicas" -}}
{{- with get $section $name }}{{ $_ := set $.object.spec $name . }}{{ end -}}
{{- end -}}
{{- if not (kindIs "invalid" $section.replicas) }}{{ $_ := set .object "dropped" true }}{{ end -}}
{{- end -}}

{{- define "weir.Ingress" -}}
{{- $annotations := merge (dict) .values.ingress.annotations .object.metadata.annotations -}}
{{- $_ := set .object.metadata "annotations" $annotations -}}
{{- range $name, $value := $annotations -}}
{{- $_ := set $annotations $name (replace "//gateway.weir.svc" (printf "//gateway.%s.svc" $.namespace) $value) -}}
{{- end -}}
{{- with .values.ingress.host -}}
{{- $_ := set (first $.object.spec.rules) "host" . -}}
{{- $_ := set (first $.object.spec.tls) "hosts" (list .) -}}
{{- end -}}
{{- with .values.ingress.tlsSecret }}{{ $_ := set (first $.object.spec.tls) "secretName" . }}{{ end -}}
{{- with .values.ingress.className }}{{ $_ := set $.object.spec "ingressClassName" . }}{{ end -}}
{{- if not .values.ingress.enabled }}{{ $_ := set .object "dropped" true }}{{ end -}}
{{- end -}}

{{- /* `of` has the template of a pod. */ -}}
{{- define "weir.pod" -}}
{{- $metadata := .of.template.metadata -}}
{{- $pod := .of.template.spec -}}
{{- $name := index $metadata.labels "app.kubernetes.io/name" -}}
{{- $section := index .values (include "weir.value" $name) -}}
{{- include "weir.metadata" (dict "object" .of.template "values" .values) -}}
{{- with .values.images.pullSecrets -}}
{{- $secrets := list }}{{ range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- $_ := set $pod "imagePullSecrets" $secrets -}}
{{- end -}}
{{- range $field := list "nodeSelector" "tolerations" "terminationGracePeriodSeconds" -}}
{{- with get $section $field }}{{ $_ := set $pod $field . }}{{ end -}}
{{- end -}}
{{- $_ := mergeOverwrite (first $pod.containers).resources (default (dict) $section.resources) -}}
{{- range concat (default list $pod.initContainers) $pod.containers -}}
{{- $given := ternary $.values.trainer.image $section.image (hasPrefix "weir-trainer" (base .image)) -}}
{{- $_ := set . "image" (include "weir.image" (dict "image" .image "given" $given "images" $.values.images)) -}}
{{- if $.values.images.pullPolicy }}{{ $_ := set . "imagePullPolicy" $.values.images.pullPolicy }}{{ end -}}
{{- end -}}
{{- $named := dict "weir-keys" .values.secrets.keys "weir-service-keys" .values.secrets.serviceKeys "weir-redis" .values.secrets.redis -}}
{{- range $volume := $pod.volumes -}}
{{- with $volume.secret }}{{ $_ := set . "secretName" (get $named .secretName) }}{{ end -}}
{{- with $volume.projected }}{{ range .sources }}{{ $_ := set .secret "name" (get $named .secret.name) }}{{ end }}{{ end -}}
{{- with $volume.configMap -}}
{{- if ne $.object.kind "Job" }}{{ $_ := set $metadata "annotations" (merge (dict "checksum/settings" (get $.checksums .name)) (default (dict) $metadata.annotations)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The name of an image: the one that is given for it; else Weir's images get the registry and the tag. */ -}}
{{- define "weir.image" -}}
{{- $parts := splitList ":" (base .image) -}}
{{- $tag := default (join ":" (rest $parts)) .images.tag -}}
{{- $registry := default (dir .image) .images.registry -}}
{{- if .given }}{{ .given }}
{{- else if not (hasPrefix "weir-" (first $parts)) }}{{ .image }}
{{- else }}{{ if ne $registry "." }}{{ trimSuffix "/" $registry }}/{{ end }}{{ first $parts }}{{ with $tag }}:{{ . }}{{ end }}
{{- end -}}
{{- end -}}
