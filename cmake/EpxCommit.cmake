# Writes OUT with the commit of SOURCE ("unknown" without git; "-dirty" when tracked files differ). Run at every build; the file is
# touched only when it changes.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=10 --exclude=* OUTPUT_VARIABLE commit ERROR_QUIET
  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE rc)
if(NOT rc EQUAL 0)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define EPX_COMMIT \"${commit}\"\n")
