/* response_format: from its value to a grammar spec. Pure. */
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar.h"
#include "server/http/openai_parse.h"

epx_status_t epx_api_set_grammar(epx_api_parse_t *p, const char *param, json_t *spec) {
    epx_grammar_t *g = NULL;
    char *text = spec ? json_dumps(spec, JSON_COMPACT) : NULL;
    json_decref(spec);
    if (!text) return epx_api_fail(p->err, 500, "internal_error", NULL, "out of memory");
    if (epx_grammar_create(text, strlen(text), &g) < 0) {
        free(text);
        return epx_api_fail(p->err, 400, "invalid_schema", param, "%s: %s", param, epx_error_message());
    }
    epx_grammar_destroy(g);
    free(p->req->grammar);
    p->req->grammar = text;
    return EPX_OK;
}

/* Only these members. */
static epx_status_t check_members(epx_api_parse_t *p, const char *name, const json_t *v, const char *const *known) {
    const char *member;
    json_t *m;
    json_object_foreach((json_t *)v, member, m) {
        int found = 0;
        for (int i = 0; known[i]; i++) found |= strcmp(known[i], member) == 0;
        if (!found) return epx_api_fail(p->err, 400, "unknown_parameter", name, "%s.%.60s: unknown", name, member);
    }
    return EPX_OK;
}

static epx_status_t json_schema(epx_api_parse_t *p, const json_t *v) {
    static const char name[] = "response_format.json_schema";
    static const char *const known[] = {"name", "schema", "strict", "description", NULL};
    const json_t *schema = json_object_get(v, "schema"), *strict = json_object_get(v, "strict"),
                 *label = json_object_get(v, "name");
    const json_t *text = json_object_get(v, "description");
    if (!json_is_object(v)) return epx_api_fail(p->err, 400, "invalid_value", name, "%s: must be an object", name);
    EPX_TRY(check_members(p, name, v, known));
    if (!json_is_string(label)) return epx_api_fail(p->err, 400, "invalid_value", name, "%s.name: must be a string", name);
    if (text && !json_is_string(text) && !json_is_null(text))
        return epx_api_bad_value(p, "response_format.json_schema.description", text, "a string or null");
    if (strict && !json_is_boolean(strict) && !json_is_null(strict))
        return epx_api_bad_value(p, "response_format.json_schema.strict", strict, "true, false or null");
    if (!json_is_object(schema)) return epx_api_fail(p->err, 400, "invalid_value", name, "%s.schema: must be an object", name);
    return epx_api_set_grammar(p, "response_format", json_pack("{s:O}", "schema", schema));
}

epx_status_t epx_api_parse_response_format(epx_api_parse_t *p, const char *name, const json_t *v) {
    static const char *const plain[] = {"type", NULL}, *const with_schema[] = {"type", "json_schema", NULL};
    const json_t *type = json_object_get(v, "type");
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_object(v) || !json_is_string(type))
        return epx_api_bad_value(p, name, v, "an object with a string type, or null");
    if (strcmp(json_string_value(type), "json_schema") == 0) {
        EPX_TRY(check_members(p, name, v, with_schema));
        return json_schema(p, json_object_get(v, "json_schema"));
    }
    EPX_TRY(check_members(p, name, v, plain));
    if (strcmp(json_string_value(type), "text") == 0) return EPX_OK;
    if (strcmp(json_string_value(type), "json_object") == 0)
        return epx_api_set_grammar(p, name, json_pack("{s:{s:s}}", "schema", "type", "object"));
    return epx_api_bad_value(p, "response_format.type", type, "\"text\", \"json_object\" or \"json_schema\"");
}
