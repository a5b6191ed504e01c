if(TARGET epx_engine)
  epx_add_fuzz(NAME fuzz_tokenizer SOURCES ${CMAKE_CURRENT_LIST_DIR}/tokenizer_fuzz.c LIBS epx_engine
    SEEDS ${CMAKE_CURRENT_LIST_DIR}/seeds/tokenizer)
  epx_add_fuzz(NAME fuzz_chat_template SOURCES ${CMAKE_CURRENT_LIST_DIR}/chat_template_fuzz.c LIBS epx_engine
    SEEDS ${CMAKE_CURRENT_LIST_DIR}/seeds/chat_template)
endif()
