epx_add_fuzz(NAME fuzz_safetensors SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/safetensors_fuzz.c LIBS epx_engine SEEDS seeds/safetensors)
epx_add_fuzz(NAME fuzz_config SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/config_fuzz.c LIBS epx_engine SEEDS seeds/config)
