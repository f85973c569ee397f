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
