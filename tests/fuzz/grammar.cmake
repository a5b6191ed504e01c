if(TARGET epx_engine)
  epx_add_fuzz(NAME fuzz_grammar SOURCES ${CMAKE_CURRENT_LIST_DIR}/grammar_fuzz.c LIBS epx_engine
    SEEDS ${CMAKE_CURRENT_LIST_DIR}/seeds/grammar)
endif()
