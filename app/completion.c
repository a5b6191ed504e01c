/* Completion scripts of shells. Nothing here knows a flag: everything is made from the tables. */
#include <stdio.h>
#include <string.h>

#include "app/page.h"

static const char *const shells = "bash|zsh|fish";

static int is_of(const epx_page_t *p, const epx_option_t *o) { return (int)((o->commands >> p->command_idx) & 1u); }

static int has_value(const epx_option_t *o) { return o->kind != EPX_OPTION_FLAG && o->kind != EPX_OPTION_NOTED_FLAG; }

/* "dir", "file" or "" for what a value names. */
static const char *path_kind(const epx_option_t *o) {
    if (!o->value) return "";
    return strcmp(o->value, "DIR") == 0 ? "dir" : strcmp(o->value, "FILE") == 0 ? "file" : "";
}

/* "epx bench serve" as "bench serve". */
static const char *command_of(const epx_page_t *p) { return p->name + strlen("epx "); }

static epx_status_t append_spaced(epx_str_t *out, const char *list) {
    for (; *list; list++) EPX_TRY(epx_str_append(out, *list == '|' ? " " : list, 1));
    return EPX_OK;
}

/* First words of the commands, separated by `gap`; each once. */
static epx_status_t append_commands(epx_str_t *out, const char *gap) {
    char last[32] = "";
    for (int i = 0; epx_page_at(i); i++) {
        char word[32];
        snprintf(word, sizeof word, "%.*s", (int)strcspn(command_of(epx_page_at(i)), " "), command_of(epx_page_at(i)));
        if (strcmp(word, last) != 0) EPX_TRY(epx_str_printf(out, "%s%s", word, gap));
        snprintf(last, sizeof last, "%s", word);
    }
    return epx_str_printf(out, "completion%sman%shelp", gap, gap);
}

static epx_status_t bash_value(epx_str_t *out, const epx_page_t *p, const epx_option_t *o) {
    const char *kind = path_kind(o);
    if (o->kind != EPX_OPTION_CHOICE && !*kind) return EPX_OK;
    EPX_TRY(epx_str_printf(out, "    '%s --%s'", command_of(p), o->name));
    if (o->alias) EPX_TRY(epx_str_printf(out, "|'%s --%s'", command_of(p), o->alias));
    if (*kind) return epx_str_printf(out, ") COMPREPLY=($(compgen -%c -- \"$cur\")); return ;;\n", *kind == 'd' ? 'd' : 'f');
    EPX_TRY(epx_str_append_z(out, ") words='"));
    EPX_TRY(append_spaced(out, o->choices));
    return epx_str_append_z(out, "' ;;\n");
}

static epx_status_t bash_flags(epx_str_t *out, const epx_page_t *p) {
    EPX_TRY(epx_str_printf(out, "        '%s') words='", command_of(p)));
    if (p->words) EPX_TRY(append_spaced(out, p->words));
    for (size_t i = 0; i < p->table->n_options; i++) {
        const epx_option_t *o = &p->table->options[i];
        if (!is_of(p, o)) continue;
        EPX_TRY(epx_str_printf(out, " --%s", o->name));
        if (o->alias) EPX_TRY(epx_str_printf(out, " --%s", o->alias));
    }
    return epx_str_append_z(out, "' ;;\n");
}

static epx_status_t bash(epx_str_t *out) {
    EPX_TRY(epx_str_append_z(
        out, "# bash completion of epx; made by `epx completion bash`\n_epx() {\n"
             "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=''\n"
             "    COMPREPLY=()\n"
             "    if [ \"$prev\" = '=' ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi\n"
             "    if [ \"$cur\" = '=' ]; then cur=''; fi\n"
             "    if [ \"$COMP_CWORD\" -gt 2 ] && [ \"$command\" = bench ]; then command=\"bench ${COMP_WORDS[2]}\"; fi\n"
             "    if [ \"$COMP_CWORD\" = 1 ]; then words='"));
    EPX_TRY(append_commands(out, " "));
    EPX_TRY(epx_str_append_z(out, "'\n    else\n    case \"$command $prev\" in\n"));
    for (int i = 0; epx_page_at(i); i++)
        for (size_t k = 0; k < epx_page_at(i)->table->n_options; k++)
            if (is_of(epx_page_at(i), &epx_page_at(i)->table->options[k]))
                EPX_TRY(bash_value(out, epx_page_at(i), &epx_page_at(i)->table->options[k]));
    EPX_TRY(epx_str_append_z(out, "    *)\n        case \"$command\" in\n"));
    for (int i = 0; epx_page_at(i); i++) EPX_TRY(bash_flags(out, epx_page_at(i)));
    return epx_str_append_z(
        out, "        bench) words='a2a serve' ;;\n        completion) words='bash zsh fish' ;;\n        esac ;;\n"
             "    esac\n    fi\n    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}\ncomplete -o filenames -F _epx epx\n");
}

/* Text between single quotes of a shell, at most a sentence; also without what zsh reads itself. */
static epx_status_t append_help(epx_str_t *out, const char *text) {
    for (; *text; text++) {
        if (*text == '.' && (text[1] == ' ' || text[1] == 0)) break;
        if (*text == '\'') EPX_TRY(epx_str_append_z(out, "'\\''"));
        else if (strchr("[]:", *text)) EPX_TRY(epx_str_append_z(out, *text == ':' ? "\\:" : *text == '[' ? "\\[" : "\\]"));
        else EPX_TRY(epx_str_append(out, text, 1));
    }
    return EPX_OK;
}

static epx_status_t zsh_option(epx_str_t *out, const epx_option_t *o, const char *name) {
    EPX_TRY(epx_str_printf(out, "        '--%s%s[", name, has_value(o) ? "=" : ""));
    EPX_TRY(append_help(out, o->help));
    EPX_TRY(epx_str_append_z(out, "]"));
    if (has_value(o)) {
        EPX_TRY(epx_str_printf(out, ":%s:", o->value ? o->value : "value"));
        if (o->kind == EPX_OPTION_CHOICE) {
            EPX_TRY(epx_str_append_z(out, "("));
            EPX_TRY(append_spaced(out, o->choices));
            EPX_TRY(epx_str_append_z(out, ")"));
        } else if (*path_kind(o)) {
            EPX_TRY(epx_str_append_z(out, *path_kind(o) == 'd' ? "_files -/" : "_files"));
        }
    }
    return epx_str_append_z(out, "'\n");
}

static epx_status_t zsh_page(epx_str_t *out, const epx_page_t *p) {
    EPX_TRY(epx_str_printf(out, "    '%s') flags=(\n", command_of(p)));
    for (size_t i = 0; i < p->table->n_options; i++) {
        const epx_option_t *o = &p->table->options[i];
        if (!is_of(p, o)) continue;
        EPX_TRY(zsh_option(out, o, o->name));
        if (o->alias) EPX_TRY(zsh_option(out, o, o->alias));
    }
    if (p->words) {
        EPX_TRY(epx_str_append_z(out, "        '1:what:("));
        EPX_TRY(append_spaced(out, p->words));
        EPX_TRY(epx_str_append_z(out, ")'\n        '2:file:_files'\n"));
    }
    return epx_str_append_z(out, "    ) ;;\n");
}

static epx_status_t zsh(epx_str_t *out) {
    EPX_TRY(epx_str_append_z(out,
                             "#compdef epx\n# zsh completion of epx; made by `epx completion zsh`\n_epx() {\n    local -a flags\n"
                             "    local command=$words[2]\n    if (( CURRENT == 2 )); then compadd -- "));
    EPX_TRY(append_commands(out, " "));
    EPX_TRY(epx_str_append_z(out, "; return; fi\n    if [[ $command == bench ]]; then\n"
                                  "        if (( CURRENT == 3 )); then compadd -- a2a serve; return; fi\n"
                                  "        command=\"bench $words[3]\"\n        shift words; (( CURRENT-- ))\n    fi\n"
                                  "    shift words; (( CURRENT-- ))\n    case $command in\n"));
    for (int i = 0; epx_page_at(i); i++) EPX_TRY(zsh_page(out, epx_page_at(i)));
    return epx_str_append_z(
        out, "    completion) flags=('1:shell:(bash zsh fish)') ;;\n    *) return 1 ;;\n    esac\n"
             "    _arguments $flags\n}\nif [[ $funcstack[1] == _epx ]]; then _epx \"$@\"; else compdef _epx epx; fi\n");
}

static epx_status_t fish_help(epx_str_t *out, const char *text) {
    EPX_TRY(epx_str_append_z(out, " -d '"));
    for (; *text && !(*text == '.' && (text[1] == ' ' || text[1] == 0)); text++) {
        if (*text == '\'' || *text == '\\') EPX_TRY(epx_str_append_z(out, "\\"));
        EPX_TRY(epx_str_append(out, text, 1));
    }
    return epx_str_append_z(out, "'\n");
}

static epx_status_t fish_option(epx_str_t *out, const char *when, const epx_option_t *o, const char *name) {
    EPX_TRY(epx_str_printf(out, "complete -c epx -n '%s' -l %s", when, name));
    if (has_value(o)) EPX_TRY(epx_str_append_z(out, *path_kind(o) == 'f' ? " -r -F" : " -x"));
    if (*path_kind(o) == 'd') EPX_TRY(epx_str_append_z(out, " -a '(__fish_complete_directories)'"));
    if (o->kind == EPX_OPTION_CHOICE) {
        EPX_TRY(epx_str_append_z(out, " -a '"));
        EPX_TRY(append_spaced(out, o->choices));
        EPX_TRY(epx_str_append_z(out, "'"));
    }
    return fish_help(out, o->help);
}

static epx_status_t fish_page(epx_str_t *out, const epx_page_t *p) {
    const char *command = command_of(p), *second = strchr(command, ' ');
    char when[160];
    if (second) {
        snprintf(when, sizeof when, "__fish_seen_subcommand_from %.*s; and __fish_seen_subcommand_from %s",
                 (int)(second - command), command, second + 1);
    } else {
        snprintf(when, sizeof when, "__fish_seen_subcommand_from %s; and not __fish_seen_subcommand_from bench", command);
    }
    for (size_t i = 0; i < p->table->n_options; i++) {
        const epx_option_t *o = &p->table->options[i];
        if (!is_of(p, o)) continue;
        EPX_TRY(fish_option(out, when, o, o->name));
        if (o->alias) EPX_TRY(fish_option(out, when, o, o->alias));
    }
    if (!p->words) return EPX_OK;
    EPX_TRY(epx_str_printf(out, "complete -c epx -n '%s' -a '", when));
    EPX_TRY(append_spaced(out, p->words));
    return epx_str_append_z(out, "'\n");
}

static epx_status_t fish(epx_str_t *out) {
    EPX_TRY(epx_str_append_z(out, "# fish completion of epx; made by `epx completion fish`\ncomplete -c epx -f\n"
                                  "complete -c epx -n __fish_use_subcommand -a '"));
    EPX_TRY(append_commands(out, " "));
    EPX_TRY(epx_str_append_z(
        out, "'\ncomplete -c epx -n '__fish_seen_subcommand_from bench; and not __fish_seen_subcommand_from a2a serve' "
             "-a 'a2a serve'\ncomplete -c epx -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'\n"));
    for (int i = 0; epx_page_at(i); i++) EPX_TRY(fish_page(out, epx_page_at(i)));
    return EPX_OK;
}

epx_status_t epx_manual_completion(const char *shell, epx_str_t *out) {
    if (!epx_options_in_list(shells, shell)) return epx_fail(EPX_ERR_ARG, "completion \"%s\": legal: bash, zsh, fish", shell);
    return *shell == 'b' ? bash(out) : *shell == 'z' ? zsh(out) : fish(out);
}
