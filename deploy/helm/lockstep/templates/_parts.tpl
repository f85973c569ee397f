{{- define "lockstep.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "lockstep.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lockstep.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "lockstep.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "lockstep.modelsHash" -}}
{{ printf "%s@%s %s@%s" .Values.models.target .Values.models.targetRevision .Values.models.draft .Values.models.draftRevision | sha256sum | trunc 8 }}
{{- end }}

{{- define "lockstep.modelsFolder" -}}
/models{{ if .Values.models.download }}/{{ include "lockstep.modelsHash" . }}{{ end }}
{{- end }}

{{- define "lockstep.settings" -}}
# The settings that follow from other values; `settings` is laid over them.
{{- if lt .Values.pods.min .Values.pods.max }}
autoscaling:
  min_replicas: {{ mul .Values.pods.min .Values.gpu.replicasPerPod }}
  max_replicas: {{ mul .Values.pods.max .Values.gpu.replicasPerPod }}
actors: {surge: true}
{{- else }}
{{- if hasKey .Values.settings "autoscaling" }}
{{- fail "settings.autoscaling: needs pods.max above pods.min" }}
{{- end }}
replicas: {{ mul .Values.pods.max .Values.gpu.replicasPerPod }}
{{- end }}
replica:
  target: {{ include "lockstep.modelsFolder" . }}/target
  {{- if .Values.models.draft }}
  speculative_config: {method: draft_model, model: {{ include "lockstep.modelsFolder" . }}/draft}
  {{- end }}
  tensor_parallel: {{ .Values.gpu.perReplica }}
scheduler: {timeout_s_max: {{ .Values.requestSecondsMax }}}
server: {served_model_name: {{ .Values.models.target | quote }}}
auth: {keys_file: /etc/lockstep/keys.yaml}
{{- end }}
