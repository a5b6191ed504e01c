/* One model, opened: tokenizer, chat template, sampling defaults and the running ranks. Events of the ranks go to one sink at a
 * time, which may be changed while they run. */
#ifndef EPX_APP_SESSION_H
#define EPX_APP_SESSION_H

#include <pthread.h>

#include "app/settings.h"
#include "engine/runtime/generation.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/front/cluster.h"

/* Called on the cluster's reader thread; neither may block. */
typedef struct {
    epx_event_fn on_event;
    void (*on_failure)(void *ctx, const char *message);
    void *ctx;
} epx_sink_t;

typedef struct {
    const epx_settings_t *settings;
    epx_tokenizer_t *tokenizer;
    epx_chat_template_t *chat_template; /* NULL: the model has none, or one that cannot be used: see template_error */
    char template_error[512];
    epx_generation_defaults_t defaults;
    epx_cluster_t *cluster;
    epx_cluster_status_t status; /* as of the start */
    pthread_mutex_t lock;        /* of the sink */
    epx_sink_t sink;
    char failure[1024]; /* "" until the ranks are lost; guarded by lock */
} epx_session_t;

/* *settings is borrowed until close. Always pair with close. */
void epx_session_init(epx_session_t *s, const epx_settings_t *settings);
/* What the ranks are started with; strings are borrowed from the settings. */
epx_rank_config_t epx_session_rank_config(const epx_settings_t *o);
/* Hosts; *facts is owned by the caller and must outlive the use of the result. EPX_ERR_NOT_FOUND, EPX_ERR_IO: the model directory
 * cannot be read. */
epx_status_t epx_session_nodes(const epx_settings_t *o, epx_str_t *facts, epx_nodes_config_t *out);
/* Read tokenizer, chat template and generation_config.json of the model directory. */
epx_status_t epx_session_load_text(epx_session_t *s);
/* Start the ranks; blocks until they are ready. */
epx_status_t epx_session_start(epx_session_t *s);
/* From now on events go to *sink; NULL: nowhere. A failure that came before is reported to it at once. */
void epx_session_set_sink(epx_session_t *s, const epx_sink_t *sink);
/* Stop the ranks. No event arrives afterwards. */
void epx_session_stop(epx_session_t *s);
void epx_session_close(epx_session_t *s);
/* 1 when the ranks are lost; the reason is copied. */
int epx_session_failed(epx_session_t *s, char *out_why, size_t n_bytes);

#endif
